"""What kept rows say of each network, mode and task: published, predicted, measured here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tf_ooo.bench.data_parallel.rows import PLAIN, STOCK
from tf_ooo.bench.paper.networks import DATA_PARALLEL, NETWORKS, PIPELINE, SINGLE, SIZES
from tf_ooo.bench.pipeline.rows import BASELINE as GPIPE
from tf_ooo.bench.report.figures import by_plan, machine_text, planned_s, step_s
from tf_ooo.bench.report.tables import range_text
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.rows import Row

# The abstract's; of all networks of a mode together.
PUBLISHED = {SINGLE: (1.03, 1.58), DATA_PARALLEL: (1.10, 1.27), PIPELINE: (1.41, 1.99)}
OVER = {SINGLE: "XLA", DATA_PARALLEL: "BytePS", PIPELINE: "GPipe"}
# What is predicted: the paper's own schedule over its baseline.
_PREDICTED = {
    SINGLE: ("multi_stream", "in_order, launches not hidden"),
    DATA_PARALLEL: ("search", "in_order"),
    PIPELINE: ("modulo", GPIPE),
}
# The paper's own schedules where a run has several.
_OWN = {DATA_PARALLEL: ("search",), PIPELINE: ("modulo", "fast_forward")}
TASKS = {"pretrain": "pre-training", "finetune": "fine-tuning"}
# Rows that name no optimizer: until when their scripts had another one than later, at which task, and which.
_EARLIER_OPTIMIZERS = (
    ("2026-11-26 14:27", "", "SGD of rate 0.01"),
    ("2026-11-26 18:20", "finetune", "Adam of rate 0.0003"),
)


@dataclass(frozen=True)
class Setting:
    """What tells measurements of a network apart.

    Attributes:
        machine: as :func:`tf_ooo.bench.report.figures.machine_text` has it.
        size: tiny, small or full.
        trained: settings of the script, devices, data, and the optimizer where it is known.
    """

    machine: str
    size: str
    trained: str


@dataclass(frozen=True)
class Measured:
    """What one run measured at a setting.

    Attributes:
        baseline, ours: names; ours is the schedule that the plan predicts to be fastest, or ``auto``.
        gain: how many times as fast; ``alone``: as what reorders nothing, of data parallel only.
        same_bits: whether all schedules ended with the baseline's bits.
        losses: of the first and the last step.
        own: gains of the paper's own schedules, of data parallel and pipelines.
        planned: what the plan predicts to be fastest where that is stock; empty: ours.
        kept: what ``auto`` ran instead of ours, with the reason; empty: ours.
        took: how long the run took, ``95 s``.
    """

    setting: Setting
    baseline: str
    ours: str
    gain: float
    same_bits: bool
    losses: tuple[float, float]
    alone: float | None = None
    own: tuple[tuple[str, float], ...] = ()
    planned: str = ""
    kept: str = ""
    took: str = ""


@dataclass(frozen=True)
class Figure:
    """A network in a mode and, where it has several, at a task: predicted gains, and runs, oldest first."""

    network: str
    mode: str
    task: str
    predicted: tuple[float, ...]
    measured: tuple[Measured, ...]

    @property
    def published(self) -> tuple[float, float] | None:
        """The abstract's range; None: the paper does not use the network in this mode."""
        network = NETWORKS.get(self.network)
        return PUBLISHED[self.mode] if network and self.mode in network.modes else None

    @property
    def entries(self) -> list[list[Measured]]:
        """Runs of one setting together; the setting that was run last comes last."""
        settings: dict[Setting, list[Measured]] = {}
        for measured in self.measured:
            settings[measured.setting] = [*settings.pop(measured.setting, ()), measured]
        return list(settings.values())

    @property
    def newest(self) -> list[list[Measured]]:
        """Of each size the setting that was run last."""
        return list({runs[0].setting.size: runs for runs in self.entries}.values())


_Key = tuple[str, str, str]


def figures_of(runs: Iterable[Run]) -> list[Figure]:
    """One for each network, mode and task of the paper, in its order; then any others that were run.

    Of each predicted configuration the last row counts, as all come from the same formulas.
    """
    asked = [
        (network.name, run.mode, run.settings.get("task", ""))
        for network in NETWORKS.values()
        for run in network.runs
    ]
    predicted: dict[_Key, dict[tuple[object, ...], float]] = {key: {} for key in asked}
    measured: dict[_Key, list[Measured]] = {}
    for run in runs:
        for key, rows in _by_key(run).items():
            gains = predicted.setdefault(key, {})
            for row in rows:
                if is_own(row, key[1]) and not row.get("changed"):
                    about = row.get("configuration"), row.get("devices"), row.get("bandwidth_bit_s")
                    gains[about] = row["predicted_speedup"]
            measured.setdefault(key, []).extend(_measured(rows, key[1], run))
    return [
        Figure(*key, tuple(sorted(gains.values())), tuple(measured.get(key, ())))
        for key, gains in predicted.items()
        if key in asked or gains or measured.get(key)
    ]


def _by_key(run: Run) -> dict[_Key, list[Row]]:
    keys: dict[_Key, list[Row]] = {}
    for row in run.rows if run.bench == "paper" else ():
        keys.setdefault((row["network"], row["mode"], _task(row)), []).append(row)
    return keys


def _task(row: Row) -> str:
    """``pretrain``, ``finetune``, or nothing."""
    words = dict(word.split("=", 1) for word in row.get("configuration", "").split() if "=" in word)
    return str(row.get("settings", words).get("task", ""))


def is_own(row: Row, mode: str) -> bool:
    """Whether a row predicts what the paper's ranges are of: its own schedule over its baseline."""
    return row["kind"] == "predicted" and (row["schedule"], row["baseline"]) == _PREDICTED[mode]


def _measured(rows: Sequence[Row], mode: str, run: Run) -> Iterator[Measured]:
    settings: dict[Setting, list[Row]] = {}
    for row in rows:
        if row["kind"] == "measured" and row["size"] in SIZES and "speedup" in row:
            setting = Setting(machine_text(run.machine), row["size"], _trained(row, run.date))
            settings.setdefault(setting, []).append(row)
    for setting, of_setting in settings.items():
        if mode == SINGLE:
            yield from (_of_one_device(setting, row) for row in of_setting)
        else:
            yield from _of_several(setting, of_setting, mode)


def _of_one_device(setting: Setting, row: Row) -> Measured:
    return Measured(
        setting, "stock", row["schedule"], row["speedup"], row["bit_equal"], tuple(row["losses"]),
        took=_took(row),
    )  # fmt: skip


def _of_several(setting: Setting, rows: Sequence[Row], mode: str) -> Iterator[Measured]:
    """Nothing where a run has no baseline, or nothing of ours."""
    names = STOCK if mode == DATA_PARALLEL else (GPIPE,)
    stock = [row for row in rows if row["schedule"].startswith(names)]
    ours = [row for row in rows if row not in stock and row["schedule"] != PLAIN]
    if not stock or not ours:
        return
    strongest, best, fastest = min(stock, key=step_s), by_plan(ours), by_plan(rows)
    seconds = {row["schedule"]: step_s(row) for row in rows}
    own = [(name, step_s(strongest) / seconds[name]) for name in _OWN[mode] if name in seconds]
    yield Measured(
        setting, strongest["schedule"], best["schedule"], step_s(strongest) / step_s(best),
        all(row["bit_equal"] for row in rows), tuple(best["losses"]), best.get("reordering_alone"),
        tuple(own),
        fastest["schedule"] if fastest in stock and planned_s(fastest) < math.inf else "", _kept(best),
        _took(best),
    )  # fmt: skip


def _trained(row: Row, date: str) -> str:
    """``layers=3 width=64 batch=12; 2 devices, 4 micro-batches; generated; Adam of rate 0.0003``."""
    parts = [" ".join(f"{name}={_value_text(value)}" for name, value in row.get("settings", {}).items())]
    if row["mode"] != SINGLE:
        rest = f", {row['microbatches']} micro-batches" if "microbatches" in row else ""
        parts.append(f"{row.get('devices', 2)} devices{rest}")
    parts += [row["data"]] if "data" in row else []
    parts += [row["optimizer"] if "optimizer" in row else _earlier_optimizer(row, date)]
    return "; ".join(filter(None, parts))


def _earlier_optimizer(row: Row, date: str) -> str:
    """Of a row that names none: what its script had then, where it has another one since; else nothing."""
    names = (name for until, task, name in _EARLIER_OPTIMIZERS if date < until and task in ("", _task(row)))
    return next(names, "")


def _value_text(value: object) -> str:
    """``(6, 12)``, which is a list in rows that were written, as ``6,12``."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _kept(row: Row) -> str:
    """``auto kept stock: ...`` where it ran nothing of ours."""
    if row["schedule"] != "auto" or row.get("runs") != "stock":
        return ""
    return ": ".join(filter(None, ("auto kept stock", row.get("reason", ""))))


def _took(row: Row) -> str:
    return f"{row['took_s']:.0f} s" if "took_s" in row else ""


def gains_text(gains: Sequence[float]) -> str:
    """``1.05-1.31``, one number where they are alike, or nothing."""
    if not gains:
        return ""
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return low if low == high else f"{low}-{high}"


def measured_text(runs: Sequence[Measured]) -> str:
    """A cell for the runs of one setting: ``tiny: 1.10 / 1.12 / 1.20 (zb_h1 over gpipe), 3 runs``."""
    alone = [run.alone for run in runs if run.alone is not None]
    ours = ", ".join(dict.fromkeys(run.ours for run in runs))
    over = ", ".join(dict.fromkeys(run.baseline for run in runs))
    notes = [f"{ours} over {over}", f"reordering alone {range_text(alone, '.2f')}" if alone else ""]
    for name in dict.fromkeys(run.planned for run in runs if run.planned):
        count = sum(run.planned == name for run in runs)
        notes.append(f"plan: {name}" + (f" in {count}" if count < len(runs) else ""))
    kept = [run.kept for run in runs if run.kept]
    notes += kept if len(runs) == 1 else [f"auto kept stock in {len(kept)}"] * bool(kept)
    text = f"{runs[0].setting.size}: {range_text([run.gain for run in runs], '.2f')}"
    text += f" ({'; '.join(filter(None, notes))})"
    return text + (f", {len(runs)} runs" if len(runs) > 1 else "")


def own_text(runs: Sequence[Measured]) -> str:
    """``modulo 0.95, fast_forward 1.02``: the paper's own schedules."""
    gains: dict[str, list[float]] = {}
    for run in runs:
        for name, gain in run.own:
            gains.setdefault(name, []).append(gain)
    return ", ".join(f"{name} {range_text(of_name, '.2f')}" for name, of_name in gains.items())


def title_of(figure: Figure) -> str:
    """``BERT-12, fine-tuning``."""
    network = NETWORKS.get(figure.network)
    return ", ".join(filter(None, (network.title if network else figure.network, TASKS.get(figure.task))))
