"""What kept rows say of each network and mode: published, predicted, measured here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tf_ooo.bench.data_parallel.rows import PLAIN, STOCK
from tf_ooo.bench.paper.networks import DATA_PARALLEL, NETWORKS, PIPELINE, SINGLE, SIZES
from tf_ooo.bench.pipeline.rows import BASELINE as GPIPE
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.rows import Row

# The abstract's; of all networks of a mode together.
PUBLISHED = {SINGLE: (1.03, 1.58), DATA_PARALLEL: (1.10, 1.27), PIPELINE: (1.41, 1.99)}
OVER = {SINGLE: "XLA", DATA_PARALLEL: "BytePS", PIPELINE: "GPipe"}
# Settings of a run that the table has.
_SAID = ("growth", "alpha", "layers", "blocks", "width", "pixels", "length", "batch")
# What is predicted: the paper's own schedule over its baseline.
_PREDICTED = {
    SINGLE: ("multi_stream", "in_order, launches not hidden"),
    DATA_PARALLEL: ("search", "in_order"),
    PIPELINE: ("modulo", GPIPE),
}


@dataclass(frozen=True)
class Measured:
    """One run of a network at a size.

    Attributes:
        baseline, ours: names; ours is the schedule that the plan predicts to be fastest.
        gain: how many times as fast; ``alone``: as what reorders nothing, of data parallel only.
        planned: the gain that the plan predicts for this machine; None: it predicts none.
        same_bits: whether all schedules ended with the baseline's bits.
        losses: of the first and the last step.
        settings: of the network; ``trained``: devices, data, and how long the run took.
    """

    size: str
    baseline: str
    ours: str
    gain: float
    same_bits: bool
    losses: tuple[float, float]
    alone: float | None = None
    planned: float | None = None
    settings: str = ""
    trained: str = ""


@dataclass(frozen=True)
class Figure:
    """A network in a mode: gains that are predicted, and runs, the oldest first."""

    network: str
    mode: str
    predicted: tuple[float, ...]
    measured: tuple[Measured, ...]


def figures_of(runs: Iterable[Run]) -> list[Figure]:
    """One for each network and mode of the paper, in its order."""
    groups: dict[tuple[str, str], list[list[Row]]] = {}
    for run in runs:
        if run.bench == "paper":
            of_run: dict[tuple[str, str], list[Row]] = {}
            for row in run.rows:
                of_run.setdefault((row["network"], row["mode"]), []).append(row)
            for key, rows in of_run.items():
                groups.setdefault(key, []).append(rows)
    asked = [(network.name, mode) for network in NETWORKS.values() for mode in network.modes]
    return [figure_of(*key, groups.get(key, [])) for key in dict.fromkeys([*asked, *groups])]


def figure_of(network: str, mode: str, runs: Sequence[Sequence[Row]]) -> Figure:
    """Of the rows of each run; the last predictions count, as they come from the same formulas."""
    predicted: tuple[float, ...] = ()
    measured = []
    for rows in runs:
        of_run = tuple(row["predicted_speedup"] for row in rows if _is_prediction(row, mode))
        predicted = of_run or predicted
        for size in SIZES:
            of_size = [row for row in rows if row["kind"] == "measured" and row["size"] == size]
            if any("speedup" in row for row in of_size):
                measured.append(measured_of(of_size, mode))
    return Figure(network, mode, predicted, tuple(measured))


def _is_prediction(row: Row, mode: str) -> bool:
    return row["kind"] == "predicted" and (row["schedule"], row["baseline"]) == _PREDICTED[mode]


def measured_of(rows: Sequence[Row], mode: str) -> Measured:
    """One run's rows of one size."""
    if mode == SINGLE:
        (row,) = rows
        return Measured(
            row["size"], "stock", row["schedule"], row["speedup"], row["bit_equal"], tuple(row["losses"]),
            settings=_settings(row), trained=_trained(row),
        )  # fmt: skip
    not_ours = STOCK if mode == DATA_PARALLEL else (GPIPE,)
    stock = [row for row in rows if row["schedule"].startswith(not_ours)]
    ours = [row for row in rows if row not in stock and row["schedule"] != PLAIN]
    strongest = min(stock, key=_step_s)
    best = min(ours, key=lambda row: float(row["predicted_step_s"]))
    predicted_s = strongest.get("predicted_step_s")
    return Measured(
        best["size"], strongest["schedule"], best["schedule"], _step_s(strongest) / _step_s(best),
        all(row["bit_equal"] for row in rows), tuple(best["losses"]), best.get("reordering_alone"),
        predicted_s and predicted_s / best["predicted_step_s"], _settings(best),
        _trained(best),
    )  # fmt: skip


def _settings(row: Row) -> str:
    """``layers=3 width=64 batch=12 task=pretrain``."""
    settings = row.get("settings", {})
    numbers = {name: settings[name] for name in _SAID if isinstance(settings.get(name), (int, float))}
    parts = [f"{name}={number:g}" for name, number in numbers.items()]
    return " ".join([*parts, *([f"task={settings['task']}"] if "task" in settings else [])])


def _trained(row: Row) -> str:
    """``2 devices, 4 micro-batches; generated; 95 s``."""
    parts = []
    if row["mode"] != SINGLE:
        rest = f", {row['microbatches']} micro-batches" if "microbatches" in row else ""
        parts.append(f"{row.get('devices', 2)} devices{rest}")
    parts += [row["data"]] if "data" in row else []
    return "; ".join([*parts, *([f"{row['took_s']:.0f} s"] if "took_s" in row else [])])


def _step_s(row: Row) -> float:
    return float(row["step_s"])


def gains_text(gains: Sequence[float]) -> str:
    """``1.05-1.31``, one number where they are alike, or nothing."""
    if not gains:
        return ""
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return low if low == high else f"{low}-{high}"


def measured_text(figure: Figure) -> list[str]:
    """Cells for one size after the other: gain, what was compared, runs; settings where they differ."""
    lines: dict[tuple[str, str, str, str], list[Measured]] = {}
    for measured in figure.measured:
        key = measured.size, measured.settings, measured.ours, measured.baseline
        lines.setdefault(key, []).append(measured)
    cells = []
    for (size, settings, ours, baseline), runs in lines.items():
        gain = statistics.median(run.gain for run in runs)
        alone = [run.alone for run in runs if run.alone is not None]
        differs = any(key[0] == size and key[1] != settings for key in lines)
        text = f"{size}{f', {settings}' if differs else ''}: {gain:.2f} ({ours} over {baseline}"
        text += f"; reordering alone {statistics.median(alone):.2f})" if alone else ")"
        cells.append(text + (f", {len(runs)} runs" if len(runs) > 1 else ""))
    return cells
