"""The tables of docs/paper.md, made from kept rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tf_ooo.bench.paper.figures import OVER, PUBLISHED, Figure, figures_of, gains_text, measured_text
from tf_ooo.bench.paper.networks import NETWORKS, SCRIPTS, PaperRun
from tf_ooo.bench.paper.why import ASSUMED
from tf_ooo.bench.report.tables import markdown, range_text
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.rows import Row

# Networks of the LayerPipe table, as docs/benchmarks/planner/layerpipe.json calls them.
_LAYERPIPE = ("vgg16", "resnet50", "vgg16-array128", "resnet50-array128")
_HEAD = (
    "Network", "Mode", "Over", "Published", "Predicted", "Measured here", "Same bits", "Loss",
    "Trained here",
)  # fmt: skip
NOT_YET = "not measured yet"


def tables_of(runs: Sequence[Run], layerpipe: Sequence[Row]) -> dict[str, str]:
    """All tables by the names that the page has for them; ``layerpipe``: predicted rows."""
    return {
        "networks": networks_table(),
        "gains": gains_table(runs),
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
    """``growth=12 batch=32``, and GPUs and micro-batches where there are several."""
    parts = [run.name]
    if run.devices > 1:
        parts.append(f"{run.devices} GPUs")
    if run.microbatches > 1:
        parts.append(f"{run.microbatches} micro-batches")
    if run.k:
        parts.append(f"k={run.k}")
    return ", ".join(parts)


def gains_table(runs: Iterable[Run]) -> str:
    """Network by mode: published, predicted, measured here."""
    return markdown(_HEAD, [cells_of(figure) for figure in figures_of(runs)])


def cells_of(figure: Figure) -> list[str]:
    """One line of :func:`gains_table`."""
    low, high = PUBLISHED[figure.mode]
    last = figure.measured[-1] if figure.measured else None
    network = NETWORKS.get(figure.network)
    return [
        network.title if network else figure.network,
        figure.mode.replace("_", " "),
        OVER[figure.mode],
        f"{low:.2f}-{high:.2f}",
        gains_text(figure.predicted),
        "; ".join(measured_text(figure)) or NOT_YET,
        "" if last is None else "yes" if all(run.same_bits for run in figure.measured) else "NO",
        "" if last is None else f"{last.losses[0]:.3f} to {last.losses[1]:.3f}",
        "" if last is None else "; ".join(filter(None, (last.settings, last.trained))),
    ]


def why_table(runs: Iterable[Run]) -> str:
    """Pipelines by sets of assumptions: modulo's gain over GPipe, and what no order can pass."""
    rows = [row for run in runs if run.bench == "paper" for row in run.rows if row["kind"] == "why"]
    columns = dict.fromkeys((row["network"], row["devices"], row["microbatches"]) for row in rows)
    gains: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row["schedule"] == "modulo":
            gains[(row["assumed"], row["network"], row["devices"], row["microbatches"])] = row
    head = ["Assumed", *(f"{name}, {devices} GPUs, {count}" for name, devices, count in columns)]
    lines = []
    for assumed in ASSUMED:
        of_line = [gains.get((assumed.name, *column)) for column in columns]
        if any(of_line):
            texts = [f"{row['predicted_speedup']:.2f} ({row['bound']:.2f})" if row else "" for row in of_line]
            lines.append([assumed.name, *texts])
    return markdown(head, lines) if lines else "No run of this is kept yet."


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
