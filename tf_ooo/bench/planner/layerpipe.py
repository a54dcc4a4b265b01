"""LayerPipe against PipeDream, simulated, for 2 to 16 processors (arXiv 2108.06629).

Published: 25% faster on average and upwards of 80% with 7 to 9 processors, with less communication, in
clock cycles; which processors and costs is not known here, ours are in :data:`ASSUMPTIONS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean

import click

from tf_ooo.bench.planner.layerpipe_layers import BATCH, WORKLOADS
from tf_ooo.bench.planner.published import predicted, show
from tf_ooo.bench.shared.options import FILE, json_option, quick_option
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.building.layerpipe_cuts import TaskLine, best_cuts
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import layerpipe, pipedream, pipedream_2bw
from tf_ooo.planning.simulation.simulator import simulate

PROCESSORS = range(2, 17)
MICROBATCHES = 64
PUBLISHED_AVERAGE, PUBLISHED_7_TO_9 = 1.25, 1.80
ASSUMPTIONS = (
    f"micro-batches of {BATCH}, 224 x 224 images (mlp: 784 numbers), 4-byte numbers; each is a step",
    "GFLOP: F, dO and dW of a layer take its forward FLOP each; the first layer has no dO",
    "arrayN: clock cycles of the products on N x N multipliers, partly filled ones counted whole",
    "messages take no time, as clock cycles are the metric; their bytes are counted, and so are the "
    "weights that one processor updates and another one reads",
    "PipeDream: contiguous layers, a backward pass is one task, stages are not replicated and no more than "
    "layers; of all cuts with the fastest slowest stage the ones that send least",
    "same speed: the fewest bytes with which LayerPipe, on as many processors or fewer, keeps PipeDream's "
    "period; gradients that several layers send to one are counted one by one for LayerPipe, together for "
    "PipeDream's stages",
    "replicated PipeDream: stages on several processors, fewest bytes with LayerPipe's period; ring "
    "allreduce of 2 (r - 1) / r weights for each micro-batch; by formula, not simulated",
)


def rows(names: Sequence[str], processors: Sequence[int] = PROCESSORS) -> Iterator[Row]:
    """One row for each workload and number of processors."""
    for name in names:
        workload = WORKLOADS[name]
        layers = workload.layers()
        options = {"slack_percent": 0}
        # LayerPipe's period, and bytes for one micro-batch.
        runs = {
            count: measured(layerpipe.make(Problem(layers, count, MICROBATCHES, options=options)), layers)
            for count in (1, *processors)
        }
        for count in processors:
            yield _row(name, workload.unit, layers, count, runs)


def measured(schedule: Schedule, layers: Sequence[LayerCosts]) -> tuple[float, float]:
    """Period of a schedule and bytes sent for one micro-batch, by simulation."""
    timeline = simulate(schedule, layers)
    sent = timeline.message_bytes / schedule.microbatches + layerpipe.weights_sent_bytes(schedule, layers)
    return timeline.steady_step_s, sent


def _row(
    name: str, unit: str, layers: tuple[LayerCosts, ...], count: int, runs: Mapping[int, tuple[float, float]]
) -> Row:
    stages = min(count, len(layers))
    whole = Problem(layers, stages, MICROBATCHES)
    pipedreams = pipedream.make(whole)
    base_s, base_bytes = measured(pipedreams, layers)
    two_versions = simulate(pipedream_2bw.make(whole), layers)
    period_s, sent_bytes = runs[count]
    fewest, fewest_bytes = _same_speed(layers, runs, base_s, (base_bytes, stages))
    return {
        "workload": name,
        "unit": unit,
        "mode": "layerpipe",
        "schedule": "layerpipe",
        "baseline": "pipedream",
        "devices": count,
        "microbatches": MICROBATCHES,
        **predicted(period_s, base_s),
        "pipedream_2bw_step_s": two_versions.steady_step_s,
        "pipedream_2bw_peak_bytes": max(two_versions.peak_bytes),
        "baseline_peak_bytes": max(simulate(pipedreams, layers).peak_bytes),
        "bound_s": sum(layer.busy_s for layer in layers) / count,
        "sent_bytes": sent_bytes,
        "baseline_sent_bytes": base_bytes,
        "same_speed_devices": fewest,
        "same_speed_sent_bytes": fewest_bytes,
        "replicated_baseline_sent_bytes": replicated_bytes(layers, count, period_s),
    }


def _same_speed(
    layers: tuple[LayerCosts, ...],
    runs: Mapping[int, tuple[float, float]],
    base_s: float,
    base: tuple[float, int],
) -> tuple[int, float]:
    """On how many processors LayerPipe sends least at PipeDream's period; the bytes.

    ``base``: PipeDream's bytes and processors, which are not exceeded.
    """
    count = base[1]
    line = TaskLine.of(layers, inside=True)
    ways = []
    for fewer, (period_s, _) in runs.items():
        if fewer <= count and period_s <= base_s * (1 + 1e-9):
            cuts = best_cuts(line, fewer, max(0.0, base_s / period_s - 1)) or ()
            ways.append((sum(cut.sent_bytes for cut in cuts), fewer, cuts))
    tried = [base]  # PipeDream's own cuts are LayerPipe's too
    # What single cuts send adds up to the bytes unless two cuts lie close together: the cheapest few count.
    for _, fewer, cuts in sorted(ways, key=lambda way: way[:2])[:3]:
        period_s, sent = measured(layerpipe.placed(Problem(layers, fewer, MICROBATCHES), cuts), layers)
        if period_s <= base_s * (1 + 1e-6):
            tried.append((sent, fewer))
    sent, fewer = min(tried)
    return fewer, sent


def replicated_bytes(layers: Sequence[LayerCosts], count: int, period_s: float) -> float:
    """Fewest bytes for a micro-batch with which PipeDream with replicated stages keeps a period."""
    none = float("inf")
    # fewest[i][q]: the first i layers on q processors.
    fewest = [[0.0] + [none] * count] + [[none] * (count + 1) for _ in layers]
    for last in range(1, len(layers) + 1):
        total_s = weights = 0.0
        for first in range(last - 1, -1, -1):
            total_s += layers[first].busy_s
            weights += layers[first].weight_bytes
            cut = 2 * layers[first - 1].output_bytes if first else 0.0
            for replicas in range(1, count + 1):
                if total_s / replicas > period_s * (1 + 1e-9):
                    continue
                sent = cut + 2 * (replicas - 1) / replicas * weights
                for used in range(replicas, count + 1):
                    fewest[last][used] = min(fewest[last][used], fewest[first][used - replicas] + sent)
    return min(fewest[-1])


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """For each workload the average gain, the best with 7 to 9 processors, and what was possible there."""
    out = {}
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == name]
        near = [row for row in mine if 7 <= row["devices"] <= 9] or mine
        out[name] = {
            "average": mean(row["predicted_speedup"] for row in mine),
            "best_7_to_9": max(row["predicted_speedup"] for row in near),
            "bound_7_to_9": max(row["predicted_baseline_step_s"] / row["bound_s"] for row in near),
            "bytes": mean(row["sent_bytes"] / row["baseline_sent_bytes"] for row in mine),
            "bytes_same_speed": mean(
                row["same_speed_sent_bytes"] / row["baseline_sent_bytes"] for row in mine
            ),
        }
    return out


def table(rows: Sequence[Row]) -> str:
    """The rows and the averages as text."""
    lines = [
        "workload         P  PipeDream  LayerPipe  gain  possible | MB sent: PD      LP  LP same speed (P)  "
        "PD replicated"
    ]
    for row in rows:
        lines.append(
            f"{row['workload']:<14} {row['devices']:>3} {row['predicted_baseline_step_s']:10.2f} "
            f"{row['predicted_step_s']:10.2f} {row['predicted_speedup']:5.2f} "
            f"{row['predicted_baseline_step_s'] / row['bound_s']:9.2f} | "
            f"{row['baseline_sent_bytes'] / 1e6:11.1f} "
            f"{row['sent_bytes'] / 1e6:7.1f} {row['same_speed_sent_bytes'] / 1e6:9.1f} "
            f"({row['same_speed_devices']:>2}) {row['replicated_baseline_sent_bytes'] / 1e6:14.1f}"
        )
    for name, numbers in summary(rows).items():
        lines.append(f"{name:<14} " + "  ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
    return "\n".join(lines)


def save_png(rows: Sequence[Row], path: Path) -> None:
    """Gain and bytes over the number of processors."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == name]
        counts = [row["devices"] for row in mine]
        style = "o--" if "array" in name else "o-"
        left.plot(counts, [row["predicted_speedup"] for row in mine], style, markersize=4, label=name)
        ratios = [row["same_speed_sent_bytes"] / row["baseline_sent_bytes"] for row in mine]
        right.plot(counts, ratios, style, markersize=4, label=name)
    left.axhline(PUBLISHED_AVERAGE, color="grey", linestyle=":", label="published average, 1.25")
    left.plot([7, 9], [PUBLISHED_7_TO_9] * 2, color="black", linewidth=3, label="published, 7-9: 1.80")
    left.set(xlabel="processors", ylabel="PipeDream's period / LayerPipe's", title="LayerPipe over PipeDream")
    right.axhline(1, color="grey", linestyle=":")
    right.set(
        xlabel="PipeDream's processors",
        ylabel="LayerPipe's bytes / PipeDream's",
        title="Bytes sent by LayerPipe at PipeDream's speed",
    )
    right.set_ylim(bottom=0)
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)


@click.command("layerpipe")
@json_option
@quick_option("VGG-16 and mlp on 4 and 8 processors.")
@click.option("--png", type=FILE, help="File for the picture.")
def main(json_file: Path | None, quick: bool, png: Path | None) -> None:
    """LayerPipe against PipeDream, simulated, for 2 to 16 processors."""
    compared = list(rows(("vgg16", "mlp"), (4, 8)) if quick else rows(list(WORKLOADS)))
    show(compared, table, ASSUMPTIONS)
    write_rows(json_file, compared)
    if png:
        save_png(compared, png)
