"""Predicted gain of V-shaped pipelines over 1F1B, ZB-V's beside the published one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tf_ooo.bench.planner import published
from tf_ooo.bench.planner.published import Inputs, beside_published, predicted
from tf_ooo.bench.shared.rows import Row, link_text
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

INPUTS = published.FOLDER / "zb_v_inputs.json"
SCHEDULES = ("zb_v", "v_half", "v_min", "dualpipe_v")
ASSUMPTIONS = (
    "seconds are proportional to the published FLOP of a transformer layer: F sbh(24h+4s), dO sbh(24h+8s), "
    "dW sbh(24h); norms, softmax, dropout and kernel launches are left out",
    "embedding and head take as long as a layer each, so that 2p stages of one layer are equal",
    "three micro-batches for each device; layers, devices and sizes as published",
    "messages take no time, but for rows with bytes_per_s: 2sbh bytes a message, no latency",
    "steps follow without a barrier (the paper's post-validation of the optimizer); the period of repeated "
    "steps is compared",
    "dualpipe_v runs F and backward one after the other: what overlapping them gains is not predicted",
)


def layer_costs(inputs: Inputs, model: Inputs) -> list[LayerCosts]:
    """Costs of one micro-batch for each layer, embedding and head included."""
    return [published.transformer_layer(inputs, model)] * (model["layers"] + 2)


def rows(inputs: Inputs, quick: bool = False) -> Iterator[Row]:
    """One row for each model, link and schedule; ``quick``: zb_v of the first model, on a free link."""
    for model in inputs["models"][: 1 if quick else None]:
        layers = layer_costs(inputs, model)
        for link in (Link(), Link(bytes_per_s=inputs["bytes_per_s"]))[: 1 if quick else None]:
            base = _run("1f1b", model, layers, link)
            for name in SCHEDULES[: 1 if quick else None]:
                yield _row(name, model, link, base, _run(name, model, layers, link))


def _run(name: str, model: Inputs, layers: list[LayerCosts], link: Link) -> tuple[float, int]:
    """Seconds of a step and bytes of activations."""
    count = {"devices": model["devices"], "microbatches": model["microbatches"]}
    timeline = simulate(plan(layers=layers, schedule=name, link=link, **count), layers, link)
    return timeline.steady_step_s, max(timeline.peak_bytes)


def _row(name: str, model: Inputs, link: Link, base: tuple[float, int], run: tuple[float, int]) -> Row:
    row: Row = {
        "workload": f"gpt-{model['name']}",
        "mode": "pipeline",
        "schedule": name,
        "baseline": "1f1b",
        "devices": model["devices"],
        "microbatches": model["microbatches"],
        **predicted(run[0], base[0]),
        "peak_bytes": run[1],
        "baseline_peak_bytes": base[1],
    }
    if link != Link():
        row["bandwidth_bit_s"] = link.bytes_per_s * 8
    if name != "zb_v":
        return row
    return beside_published(row, model["published"]["zb_v"] / model["published"]["1f1b"])


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    heads = ("model", "p", "m", "schedule", "link", "predicted", "published", "off by", "memory")
    lines = ["{:>6} {:>3} {:>3} {:>10} {:>10} {:>9} {:>9} {:>7} {:>7}".format(*heads)]
    for row in rows:
        link = link_text(row)
        known = "published_speedup" in row
        published = f"{row['published_speedup']:9.3f} {row['deviation']:+7.1%}" if known else " " * 17
        memory = row["peak_bytes"] / row["baseline_peak_bytes"]
        lines.append(
            f"{row['workload'][4:]:>6} {row['devices']:>3} {row['microbatches']:>3} {row['schedule']:>10} "
            f"{link:>10} {row['predicted_speedup']:9.3f} {published} {memory:7.3f}"
        )
    return "\n".join(lines)


main = published.command(
    "zb-v", __doc__, "zb_v of the smallest model only.", INPUTS, rows, table, ASSUMPTIONS
)
