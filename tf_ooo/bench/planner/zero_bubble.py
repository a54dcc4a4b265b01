"""Predicted gains over 1F1B beside the published ones of Zero Bubble's models."""

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
V_INPUTS = published.FOLDER / "zb_v_inputs.json"
V_SCHEDULES = ("zb_v", "v_half", "v_min", "dualpipe_v")
_FLOP = (
    "seconds are proportional to the published FLOP of a transformer layer: F sbh(24h+4s), dO sbh(24h+8s), "
    "dW sbh(24h); norms, softmax, dropout and kernel launches are left out"
)
_MESSAGES = "messages take no time, but for rows with bytes_per_s: 2sbh bytes a message, no latency"
_STEPS = (
    "steps follow without a barrier (the paper's post-validation of the optimizer); the period of repeated "
    "steps is compared"
)
ASSUMPTIONS = (
    _FLOP,
    "ends_shorter: the first and the last stage have one layer less, as published, and embedding and head "
    "take no time; ends_equal: embedding and head take as long as the layer that they replace",
    "ZB-2p is taken to be the handcrafted ZB-H2 (in flight: 2p - 1); the authors' is found by search",
    _MESSAGES,
    f"{_STEPS}, for 1F1B it is the makespan: device 0 begins first and ends last",
    "the optimizer's step and its synchronization, which both schedules pay, take no time: the published "
    "ratio would be a little higher without them",
)
V_ASSUMPTIONS = (
    _FLOP,
    "embedding and head take as long as a layer each, so that 2p stages of one layer are equal",
    "three micro-batches for each device; layers, devices and sizes as published",
    _MESSAGES,
    _STEPS,
    "dualpipe_v runs F and backward one after the other: what overlapping them gains is not predicted",
)


def stage_costs(inputs: Inputs, model: Inputs, equal: bool) -> list[LayerCosts]:
    """Costs of one micro-batch for each stage, as one layer each; ``equal``: the first and the last stage
    take as long as the others."""
    size = inputs["sequence"] * model["microbatch"] * model["hidden"]
    layer = published.transformer_layer(inputs, model, weight_grad_bytes=32.0 * size)
    count, last = model["devices"], model["devices"] - 1
    most = (model["layers"] + 2) // count
    layers = [most - (stage in (0, last) and not equal) for stage in range(count)]
    return [dataclasses.replace(layer.scaled(n), output_bytes=layer.output_bytes) for n in layers]


def rows(inputs: Inputs, quick: bool = False) -> Iterator[Row]:
    """One row for each model, assumption and number of micro-batches; ``quick``: the published number."""
    for model in inputs["models"]:
        known = model["published"]
        counts = [known["microbatches"]] if quick else model["microbatches"]
        for microbatches, equal, link in itertools.product(counts, (False, True), _links(inputs)):
            layers = stage_costs(inputs, model, equal)
            base, zb_h1, zb_h2 = (
                _timeline(name, model, layers, microbatches, link) for name in ("1f1b", "zb_h1", "zb_h2")
            )
            row = {
                **_row("zb_h2", model, link, zb_h2, base),
                "predicted_speedup_zb_h1": base.steady_step_s / zb_h1.steady_step_s,
                "bubble_fraction": 1 - max(zb_h2.busy_s) / zb_h2.steady_step_s,
                "ends": "equal" if equal else "shorter",
            }
            as_published = microbatches == known["microbatches"]
            yield beside_published(row, known["zb_2p"] / known["1f1b"]) if as_published else row


def v_rows(inputs: Inputs, quick: bool = False) -> Iterator[Row]:
    """One row for each model, link and schedule; ``quick``: zb_v of the first model, on a free link."""
    most = 1 if quick else None
    for model, link in itertools.product(inputs["models"][:most], _links(inputs)[:most]):
        # Embedding and head included.
        layers = [published.transformer_layer(inputs, model)] * (model["layers"] + 2)
        base = _timeline("1f1b", model, layers, model["microbatches"], link)
        for name in V_SCHEDULES[:most]:
            run = _timeline(name, model, layers, model["microbatches"], link)
            row, known = _row(name, model, link, run, base), model["published"]
            yield beside_published(row, known["zb_v"] / known["1f1b"]) if name == "zb_v" else row


def _links(inputs: Inputs) -> tuple[Link, Link]:
    return Link(), Link(bytes_per_s=inputs["bytes_per_s"])


def _timeline(
    name: str, model: Inputs, layers: Sequence[LayerCosts], microbatches: int, link: Link
) -> Timeline:
    run = {"devices": model["devices"], "microbatches": microbatches}
    return simulate(plan(layers=layers, schedule=name, link=link, **run), layers, link)


def _row(name: str, model: Inputs, link: Link, timeline: Timeline, base: Timeline) -> Row:
    row: Row = {
        "workload": f"gpt-{model['name']}",
        "mode": "pipeline",
        "schedule": name,
        "baseline": "1f1b",
        "devices": model["devices"],
        "microbatches": timeline.schedule.microbatches,
        **predicted(timeline.steady_step_s, base.steady_step_s),
        "peak_bytes": max(timeline.peak_bytes),
        "baseline_peak_bytes": max(base.peak_bytes),
    }
    return row if link == Link() else {**row, "bandwidth_bit_s": link.bytes_per_s * 8}


def table(rows: Sequence[Row]) -> str:
    """The rows with a published figure, as text."""
    lines = [" model   p    m     ends       link predicted published  off by"]
    for row in rows:
        if "published_speedup" in row:
            lines.append(
                f"{row['workload'][4:]:>6} {row['devices']:>3} {row['microbatches']:>4} {row['ends']:>8} "
                f"{link_text(row):>10} {row['predicted_speedup']:9.3f} {row['published_speedup']:9.3f} "
                f"{row['deviation']:+7.1%}"
            )
    return "\n".join(lines)


def v_table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [" model   p   m   schedule       link predicted published  off by  memory"]
    for row in rows:
        known = "published_speedup" in row
        beside = f"{row['published_speedup']:9.3f} {row['deviation']:+7.1%}" if known else " " * 17
        lines.append(
            f"{row['workload'][4:]:>6} {row['devices']:>3} {row['microbatches']:>3} {row['schedule']:>10} "
            f"{link_text(row):>10} {row['predicted_speedup']:9.3f} {beside} "
            f"{row['peak_bytes'] / row['baseline_peak_bytes']:7.3f}"
        )
    return "\n".join(lines)


zero_bubble = published.command(
    "zero-bubble",
    "Predicted gain of ZB-H2 over 1F1B beside Zero Bubble's published one, for its four models.",
    "Only the numbers of micro-batches published.", INPUTS, rows, table, ASSUMPTIONS,
)  # fmt: skip
zb_v = published.command(
    "zb-v", "Predicted gain of V-shaped pipelines over 1F1B, ZB-V's beside the published one.",
    "zb_v of the smallest model only.", V_INPUTS, v_rows, v_table, V_ASSUMPTIONS,
)  # fmt: skip
