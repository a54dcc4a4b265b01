"""How far ``search`` and ``auto`` are from the optimum: random small instances, solved exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from tf_ooo.bench.planner.exact import ExactLayer, optimum
from tf_ooo.bench.shared.options import json_option, quick_option
from tf_ooo.bench.shared.rows import Row, write_rows
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
        LayerCosts(*seconds, weight_bytes=layer.communication, inputs=layer.inputs)
        for layer in layers
        for seconds in [(layer.forward, layer.output_grad, layer.weight_grad, layer.update)]
    ]


def rows(count: int = INSTANCES, seed: int = SEED, evaluations: int = 4000) -> Iterator[Row]:
    """One row for each instance: the optimum, and the period of each policy."""
    draw = random.Random(seed)
    for number in range(count):
        layers = instance(draw)
        exact = optimum(layers)
        row: Row = {
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
    schedule = plan(
        layers=table, schedule=policy, devices=WORKERS, link=LINK, mode="data_parallel", **options
    )
    return simulate(schedule, table, LINK, steps=4).steady_step_s


def summary(rows: Sequence[Row]) -> str:
    """For each policy how often it is optimal, and the mean and largest gap."""
    lines = [f"{len(rows)} instances, {sum(r['optimum_s'] == r['optimum_bound_s'] for r in rows)} proved"]
    for policy in POLICIES:
        gaps = [row[policy] / row["optimum_s"] - 1 for row in rows]
        optimal = sum(gap < 1e-9 for gap in gaps)
        lines.append(
            f"{policy:<16} optimal {optimal:>4}, mean gap {sum(gaps) / len(gaps):7.2%}, "
            f"largest {max(gaps):7.2%}, smallest {min(gaps):7.2%}"
        )
    return "\n".join(lines)


@click.command("quality")
@json_option
@quick_option("20 instances.")
def main(json_file: Path | None, quick: bool) -> None:
    """How far search and auto are from the optimum: random small instances, solved exactly."""
    solved = list(rows(20 if quick else INSTANCES))
    click.echo(summary(solved))
    write_rows(json_file, solved)
