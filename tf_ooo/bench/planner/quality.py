"""How far ``search`` and ``auto`` are from the optimum: random small instances, solved exactly.

``python -m tf_ooo.bench.planner.quality --json FILE``
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from tf_ooo.bench.planner.exact import ExactLayer, optimum
from tf_ooo.bench.shared.command import parser_of, write_rows
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

INSTANCES, SEED = 200, 7
MOST_LAYERS = 7
# Two workers and one byte a second: an allreduce of n bytes takes n seconds.
LINK, WORKERS = Link(0.0, 1.0), 2
POLICIES: dict[str, dict[str, Any]] = {
    "search": {"slice_bytes": 0},
    "auto": {"slice_bytes": 0},
    "reverse_first_k": {},
    "in_order": {},
}


def instance(draw: random.Random) -> list[ExactLayer]:
    """A chain of 2 to 7 layers with skip connections; small whole numbers, unequal."""
    return [
        ExactLayer(
            forward=draw.randint(1, 20),
            output_grad=draw.randint(1, 20),
            weight_grad=draw.randint(1, 20),
            communication=draw.randint(0, 40),
            update=draw.choice([0, 0, 1, 3]),
            inputs=_inputs(layer, draw),
        )
        for layer in range(draw.randint(2, MOST_LAYERS))
    ]


def _inputs(layer: int, draw: random.Random) -> tuple[int, ...]:
    if not layer:
        return ()
    skip = {draw.randrange(layer)} if draw.random() < 0.3 else set()
    return tuple(sorted({layer - 1, *skip}))


def costs(layers: Sequence[ExactLayer]) -> list[LayerCosts]:
    """The same numbers for the planner."""
    return [
        LayerCosts(
            layer.forward,
            layer.output_grad,
            layer.weight_grad,
            layer.update,
            weight_bytes=layer.communication,
            inputs=layer.inputs,
        )
        for layer in layers
    ]


def rows(count: int = INSTANCES, seed: int = SEED, evaluations: int = 4000) -> Iterator[dict[str, Any]]:
    """One row for each instance: the optimum, and the period of each policy."""
    draw = random.Random(seed)
    for number in range(count):
        layers = instance(draw)
        exact = optimum(layers)
        row: dict[str, Any] = {
            "instance": number,
            "layers": len(layers),
            "optimum_s": exact.period,
            "optimum_bound_s": exact.bound,
        }
        for policy, options in POLICIES.items():
            row[policy] = period_s(policy, layers, evaluations, **options)
        yield row


def period_s(policy: str, layers: Sequence[ExactLayer], evaluations: int, **options: Any) -> float:
    """Simulated seconds of one step."""
    if "slice_bytes" in options:
        options["evaluations"] = evaluations
    table = costs(layers)
    made = plan(layers=table, schedule=policy, devices=WORKERS, link=LINK, mode="data_parallel", **options)
    return simulate(made, table, LINK, steps=4).steady_step_s


def summary(found: Sequence[dict[str, Any]]) -> str:
    """For each policy how often it is optimal, and the mean and largest gap."""
    lines = [f"{len(found)} instances, {sum(r['optimum_s'] == r['optimum_bound_s'] for r in found)} proved"]
    for policy in POLICIES:
        gaps = [row[policy] / row["optimum_s"] - 1 for row in found]
        optimal = sum(gap < 1e-9 for gap in gaps)
        lines.append(
            f"{policy:<16} optimal {optimal:>4}, mean gap {sum(gaps) / len(gaps):7.2%}, "
            f"largest {max(gaps):7.2%}, smallest {min(gaps):7.2%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the gaps."""
    parser = parser_of(__doc__, quick="20 instances")
    options = parser.parse_args(arguments)
    found = list(rows(20 if options.quick else INSTANCES))
    print(summary(found))
    write_rows(options.json, found)


if __name__ == "__main__":
    main()
