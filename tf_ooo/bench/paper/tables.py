"""The tables of docs/paper.md, made from kept rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tf_ooo.bench.paper.figures import (
    OVER,
    Figure,
    Measured,
    figures_of,
    gains_text,
    measured_text,
    own_text,
    title_of,
)
from tf_ooo.bench.paper.networks import NETWORKS, SCRIPTS, PaperRun
from tf_ooo.bench.paper.why import ASSUMED, V100_BYTES
from tf_ooo.bench.report.tables import markdown, range_text
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.rows import Row

# Networks of the LayerPipe table, as docs/benchmarks/planner/layerpipe.json calls them.
_LAYERPIPE = ("vgg16", "resnet50", "vgg16-array128", "resnet50-array128")
HEAD = (
    "Network", "Mode", "Over", "Published", "Predicted", "Measured here", "The paper's own, here",
    "Same bits", "Loss", "Trained here", "Machine",
)  # fmt: skip
_MEMORY = f"GB on GPipe's fullest GPU, of a V100's {V100_BYTES / 1e9:.0f}"
NOT_YET = "not measured yet"


def tables_of(runs: Sequence[Run], layerpipe: Sequence[Row]) -> dict[str, str]:
    """All tables by the names that the page has for them; ``layerpipe``: predicted rows."""
    return {
        "networks": networks_table(),
        **gains_tables(runs),
        "why": why_table(runs),
        "layerpipe": layerpipe_table(layerpipe),
        "reconstruction": reconstruction_table(runs),
    }


def networks_table() -> str:
    """Which network, configuration and data set comes from where."""
    head = ("Network", "Command", "Mode", "Published settings", "From", "Data set", "Left open, or assumed")
    lines = []
    for network in NETWORKS.values():
        for mode in network.modes:
            runs = [run for run in network.runs if run.mode == mode]
            assumed = ", ".join(dict.fromkeys(run.assumed for run in runs if run.assumed))
            lines.append([
                network.title, f"`{network.name}`", mode.replace("_", " "),
                "; ".join(map(settings_text, runs)) if network.source == SCRIPTS else "",
                "the authors' scripts" if network.source == SCRIPTS else "the list of networks only",
                network.data, network.left_open + (f"; assumed: {assumed}" if assumed else ""),
            ])  # fmt: skip
    return markdown(head, lines)


def settings_text(run: PaperRun) -> str:
    """``growth=12 batch=32``, and GPUs and micro-batches where there are several; whether it is assumed."""
    parts = [run.name]
    if run.devices > 1:
        parts.append(f"{run.devices} GPUs")
    if run.microbatches > 1:
        parts.append(f"{run.microbatches} micro-batches")
    if run.k:
        parts.append(f"k={run.k}")
    return ", ".join(parts) + (" (assumed)" if run.assumed else "")


def gains_tables(runs: Iterable[Run]) -> dict[str, str]:
    """Network by mode and task: published, predicted, measured at the setting that was run last (``gains``),
    and what was measured at others before (``earlier``); without machines where there is one only."""
    figures = figures_of(runs)
    lines = {
        "gains": [line for figure in figures for line in lines_of(figure)],
        "earlier": [
            [*_about(figure), *_cells(entry)]
            for figure in figures
            for entry in figure.entries
            if entry not in figure.newest
        ],
    }
    machine = HEAD.index("Machine")
    is_one = len({line[machine] for part in lines.values() for line in part if line[machine]}) == 1
    for line in (line for part in lines.values() for line in part if is_one):
        line[machine] = ""
    return {
        name: markdown(HEAD, part) if part else "No other setting was run." for name, part in lines.items()
    }


def lines_of(figure: Figure) -> list[list[str]]:
    """Lines of ``gains``: one for each size that was measured, one where none was."""
    about = _about(figure)
    lines = [[*about, *_cells(runs)] for runs in figure.newest]
    return lines or [[*about, NOT_YET, *[""] * (len(HEAD) - len(about) - 1)]]


def _about(figure: Figure) -> list[str]:
    return [
        title_of(figure), figure.mode.replace("_", " "), OVER[figure.mode] if figure.published else "",
        "-".join(f"{gain:.2f}" for gain in figure.published or ()),
        gains_text(figure.predicted) + (", assumed settings" if _is_assumed(figure) else ""),
    ]  # fmt: skip


def _is_assumed(figure: Figure) -> bool:
    """Whether no published configuration is behind its predictions."""
    network = NETWORKS.get(figure.network)
    runs = [run for run in network.runs if run.settings.get("task", "") == figure.task] if network else []
    return bool(figure.predicted and runs) and all(run.assumed for run in runs)


def _cells(runs: Sequence[Measured]) -> list[str]:
    """Of one setting; loss and duration are the last run's."""
    last = runs[-1]
    return [
        measured_text(runs),
        own_text(runs),
        "yes" if all(run.same_bits for run in runs) else "NO",
        f"{last.losses[0]:.3f} to {last.losses[1]:.3f}",
        "; ".join(filter(None, (last.setting.trained, last.took))),
        last.setting.machine,
    ]


def why_table(runs: Iterable[Run]) -> str:
    """Pipelines by sets of assumptions: modulo's gain over GPipe, and what no order can pass; memory."""
    rows = [row for run in runs if run.bench == "paper" for row in run.rows]
    gains: dict[str, dict[_Column, str]] = {}
    for row in rows:
        if row["kind"] == "why" and row["schedule"] == "modulo":
            text = f"{row['predicted_speedup']:.2f} ({row['bound']:.2f})"
            gains.setdefault(row["assumed"], {})[_column(row)] = text
        if row["kind"] == "memory":
            needed_gb = (row["peak_bytes"] + row["state_bytes"]) / 1e9
            gains.setdefault(_MEMORY, {})[_column(row)] = f"{needed_gb:.1f}"
    columns = sorted(
        {column for of_line in gains.values() for column in of_line},
        key=lambda column: (list(NETWORKS).index(column[0]), column[1]),
    )
    head = [
        "Assumed",
        *(f"{name}, {devices} GPUs, {count} micro-batches" for name, devices, count in columns),
    ]
    names = [name for name in (*(assumed.name for assumed in ASSUMED), _MEMORY) if name in gains]
    lines = [[name, *(gains[name].get(column, "") for column in columns)] for name in names]
    return markdown(head, lines) if lines else "No run of this is kept yet."


_Column = tuple[str, int, int]


def _column(row: Row) -> _Column:
    """A network, its GPUs, its micro-batches."""
    return row["network"], row["devices"], row["microbatches"]


def layerpipe_table(rows: Iterable[Row]) -> str:
    """LayerPipe over PipeDream by processors."""
    gains = {(row["workload"], row["devices"]): row["predicted_speedup"] for row in rows}
    processors = sorted({devices for _, devices in gains})
    lines = [[str(count), *(f"{gains[name, count]:.2f}" for name in _LAYERPIPE)] for count in processors]
    means = [statistics.fmean(gains[name, count] for count in processors) for name in _LAYERPIPE]
    most = [max(gains[name, count] for count in (7, 8, 9)) for name in _LAYERPIPE]
    lines.append(["2 to 16, mean (published: 1.25)", *(f"{mean:.2f}" for mean in means)])
    lines.append(["7 to 9, most (published: 1.80 and more)", *(f"{gain:.2f}" for gain in most)])
    return markdown(["Processors", *_LAYERPIPE], lines)


def reconstruction_table(runs: Iterable[Run]) -> str:
    """What ways of coming by earlier weights lose of a test accuracy, in points of a percent."""
    lost: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        for row in run.rows if run.bench == "layerpipe" else ():
            if "points_below_synchronous" in row:
                key = (row["network"], row["rate"], str(row["devices"]), row["training"])
                lost.setdefault(key, []).append(row["points_below_synchronous"])
    lines = [
        [*key, range_text(points, "+.2f"), str(len(points))]
        for key, points in lost.items()
        if key[-1] != "synchronous"
    ]
    head = ["Network", "Rate", "Devices", "Weights", "Points below synchronous (min / median / max)", "Runs"]
    return markdown(head, lines) if lines else "No run of this is kept yet."
