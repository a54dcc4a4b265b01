"""Predicted gain of ZB-H2 over 1F1B beside Zero Bubble's published one, for its four models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from tf_ooo.bench.planner import published
from tf_ooo.bench.planner.published import Inputs, beside_published, predicted
from tf_ooo.bench.shared.rows import Row, link_text
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.rewriting.plan import plan

INPUTS = published.FOLDER / "zero_bubble_inputs.json"
ASSUMPTIONS = (
    "seconds are proportional to the published FLOP of a transformer layer: F sbh(24h+4s), dO sbh(24h+8s), "
    "dW sbh(24h); norms, softmax, dropout and kernel launches are left out",
    "ends_shorter: the first and the last stage have one layer less, as published, and embedding and head "
    "take no time; ends_equal: embedding and head take as long as the layer that they replace",
    "ZB-2p is taken to be the handcrafted ZB-H2 (in flight: 2p - 1); the authors' is found by search",
    "messages take no time, but for rows with bytes_per_s: 2sbh bytes a message, no latency",
    "steps follow without a barrier (the paper's post-validation of the optimizer); the period of repeated "
    "steps is compared, for 1F1B it is the makespan: device 0 begins first and ends last",
    "the optimizer's step and its synchronization, which both schedules pay, take no time: the published "
    "ratio would be a little higher without them",
)


def stage_costs(inputs: Inputs, model: Inputs, equal: bool) -> list[LayerCosts]:
    """Costs of one micro-batch for each stage, as one layer each.

    Args:
        inputs: the file of configurations.
        model: one of its models.
        equal: the first and the last stage take as long as the others.
    """
    size = inputs["sequence"] * model["microbatch"] * model["hidden"]
    layer = published.transformer_layer(inputs, model, weight_grad_bytes=32.0 * size)
    count, last = model["devices"], model["devices"] - 1
    most = (model["layers"] + 2) // count
    layers = [most - (stage in (0, last) and not equal) for stage in range(count)]
    return [dataclasses.replace(layer.scaled(n), output_bytes=layer.output_bytes) for n in layers]


def rows(inputs: Inputs, quick: bool = False) -> Iterator[Row]:
    """One row for each model, assumption and number of micro-batches; ``quick``: the published number."""
    links = (Link(), Link(bytes_per_s=inputs["bytes_per_s"]))
    for model in inputs["models"]:
        published = model["published"]
        ratio = published["zb_2p"] / published["1f1b"]
        for microbatches, equal, link in itertools.product(model["microbatches"], (False, True), links):
            known = microbatches == published["microbatches"]
            if known or not quick:
                row = _row(model, stage_costs(inputs, model, equal), microbatches, link)
                row["ends"] = "equal" if equal else "shorter"
                yield beside_published(row, ratio) if known else row


def _row(model: Inputs, layers: Sequence[LayerCosts], microbatches: int, link: Link) -> Row:
    devices = model["devices"]

    def timeline(name: str) -> Timeline:
        schedule = plan(layers=layers, schedule=name, devices=devices, microbatches=microbatches, link=link)
        return simulate(schedule, layers, link)

    base, zb_h1, zb_h2 = map(timeline, ("1f1b", "zb_h1", "zb_h2"))
    row = {
        "workload": f"gpt-{model['name']}",
        "mode": "pipeline",
        "schedule": "zb_h2",
        "baseline": "1f1b",
        "devices": devices,
        "microbatches": microbatches,
        **predicted(zb_h2.steady_step_s, base.steady_step_s),
        "predicted_speedup_zb_h1": base.steady_step_s / zb_h1.steady_step_s,
        "bubble_fraction": 1 - max(zb_h2.busy_s) / zb_h2.steady_step_s,
        "peak_bytes": max(zb_h2.peak_bytes),
        "baseline_peak_bytes": max(base.peak_bytes),
    }
    if link != Link():
        row["bandwidth_bit_s"] = link.bytes_per_s * 8
    return row


def table(rows: Sequence[Row]) -> str:
    """The rows with a published figure, as text."""
    lines = [" model   p    m     ends       link predicted published  off by"]
    for row in rows:
        if "published_speedup" in row:
            link = link_text(row)
            lines.append(
                f"{row['workload'][4:]:>6} {row['devices']:>3} {row['microbatches']:>4} {row['ends']:>8} "
                f"{link:>10} {row['predicted_speedup']:9.3f} {row['published_speedup']:9.3f} "
                f"{row['deviation']:+7.1%}"
            )
    return "\n".join(lines)


main = published.command(
    "zero-bubble", __doc__, "Only the numbers of micro-batches published.", INPUTS, rows, table, ASSUMPTIONS
)
