"""Predicted gain of ZB-H2 over 1F1B beside Zero Bubble's published one, for its four models.

``python -m tf_ooo.bench.planner.zero_bubble --json FILE``
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_ooo.bench.shared.command import link_text, parser_of, show, write_rows
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.layer_work import transformer_activation_bytes, transformer_flop
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.rewriting.plan import plan

INPUTS = Path(__file__).parents[3] / "docs" / "benchmarks" / "planner" / "zero_bubble_inputs.json"
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


def load(path: Path = INPUTS) -> dict[str, Any]:
    """The models and published figures."""
    inputs: dict[str, Any] = json.loads(path.read_text())
    return inputs


def stage_costs(inputs: Mapping[str, Any], model: Mapping[str, Any], equal: bool) -> list[LayerCosts]:
    """Costs of one micro-batch for each stage, as one layer each.

    Args:
        inputs: :func:`load`.
        model: one of its models.
        equal: the first and the last stage take as long as the others.
    """
    hidden, sequence, batch = model["hidden"], inputs["sequence"], model["microbatch"]
    forward, output_grad, weight_grad = transformer_flop(hidden, sequence, batch)
    rate = inputs["flop_per_s"]
    layer = LayerCosts(
        forward / rate,
        output_grad / rate,
        weight_grad / rate,
        activation_bytes=transformer_activation_bytes(hidden, model["heads"], sequence, batch),
        weight_grad_bytes=32.0 * sequence * batch * hidden,
        output_bytes=2.0 * sequence * batch * hidden,
    )
    count, last = model["devices"], model["devices"] - 1
    most = (model["layers"] + 2) // count
    layers = [most - (stage in (0, last) and not equal) for stage in range(count)]
    return [dataclasses.replace(layer.scaled(n), output_bytes=layer.output_bytes) for n in layers]


def rows(inputs: Mapping[str, Any], quick: bool = False) -> Iterator[dict[str, Any]]:
    """One row for each model, assumption and number of micro-batches; ``quick``: the published number."""
    for model in inputs["models"]:
        published = model["published"]
        for microbatches in model["microbatches"]:
            known = microbatches == published["microbatches"]
            if quick and not known:
                continue
            for equal in (False, True):
                for link in (Link(), Link(bytes_per_s=inputs["bytes_per_s"])):
                    row = _row(model, stage_costs(inputs, model, equal), microbatches, link)
                    row["ends"] = "equal" if equal else "shorter"
                    if known:
                        ratio = published["zb_2p"] / published["1f1b"]
                        row["published_speedup"] = ratio
                        row["deviation"] = row["predicted_speedup"] / ratio - 1
                    yield row


def _row(
    model: Mapping[str, Any], layers: Sequence[LayerCosts], microbatches: int, link: Link
) -> dict[str, Any]:
    run: dict[str, Timeline] = {}
    for name in ("1f1b", "zb_h1", "zb_h2"):
        made = plan(
            layers=layers, schedule=name, devices=model["devices"], microbatches=microbatches, link=link
        )
        run[name] = simulate(made, layers, link)
    step_s = {name: timeline.steady_step_s for name, timeline in run.items()}
    row = {
        "workload": f"gpt-{model['name']}",
        "mode": "pipeline",
        "schedule": "zb_h2",
        "baseline": "1f1b",
        "devices": model["devices"],
        "microbatches": microbatches,
        "predicted_step_s": step_s["zb_h2"],
        "predicted_baseline_step_s": step_s["1f1b"],
        "predicted_speedup": step_s["1f1b"] / step_s["zb_h2"],
        "predicted_speedup_zb_h1": step_s["1f1b"] / step_s["zb_h1"],
        "bubble_fraction": 1 - max(run["zb_h2"].busy_s) / step_s["zb_h2"],
        "peak_bytes": max(run["zb_h2"].peak_bytes),
        "baseline_peak_bytes": max(run["1f1b"].peak_bytes),
    }
    if link != Link():
        row["bandwidth_bit_s"] = link.bytes_per_s * 8
    return row


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows with a published figure, as text."""
    lines = [" model   p    m     ends       link predicted published  off by"]
    for row in found:
        if "published_speedup" in row:
            link = link_text(row)
            lines.append(
                f"{row['workload'][4:]:>6} {row['devices']:>3} {row['microbatches']:>4} {row['ends']:>8} "
                f"{link:>10} {row['predicted_speedup']:9.3f} {row['published_speedup']:9.3f} "
                f"{row['deviation']:+7.1%}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints predicted beside published, and the assumptions."""
    parser = parser_of(__doc__, quick="only the numbers of micro-batches published")
    parser.add_argument("--inputs", type=Path, default=INPUTS, help="models and published figures")
    options = parser.parse_args(arguments)
    found = list(rows(load(options.inputs), options.quick))
    show(found, table, ASSUMPTIONS)
    write_rows(options.json, found)


if __name__ == "__main__":
    main()
