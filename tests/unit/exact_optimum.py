"""Measures how far ``search`` and ``auto`` are from the optimum: random small instances, solved exactly.

The exact solver is OR-Tools' CP-SAT, with a formulation of its own, on purpose: nothing of the planner's
dependency relation, simulator or search is used.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel

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
# Tasks that share a machine must not overlap.
MACHINES = (("F", "dO", "dW"), ("comm",), ("U",))
Task = tuple[str, int]  # kind, layer


@dataclass(frozen=True)
class ExactLayer:
    """Whole numbers of one time unit: F, dO, dW, communication, U; ``inputs``: layers that F reads."""

    forward: int
    output_grad: int
    weight_grad: int
    communication: int
    update: int
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    """Holds the solver's answer: the best period found, and the largest that is proved to be a bound."""

    period: int
    bound: int


def optimum(layers: Sequence[ExactLayer], limit_s: float = 10.0) -> Optimum:
    """The shortest period of a repeated data parallel step.

    It is that of a round from the loss of a step to that of the next: all forwards end before the loss and
    each has waited for its update, so nothing crosses it.  A test compares with a formulation that does
    not assume that.
    """
    from ortools.sat.python import cp_model

    model, took = cp_model.CpModel(), durations(layers)
    horizon = sum(took.values()) + 1
    start = {task: model.new_int_var(0, horizon, f"start {task}") for task in took}
    for earlier, later in (*waits(layers), *((("U", i), ("F", i)) for i in range(len(layers)))):
        if (earlier[0], later[0]) != ("F", "dO"):  # the loss is between them
            model.add(start[later] >= start[earlier] + took[earlier])
    for kinds in MACHINES:
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[task], took[task], f"{task}")
            for task in start
            if task[0] in kinds and took[task]
        )
    period = model.new_int_var(0, horizon, "period")
    model.add_max_equality(period, [start[task] + took[task] for task in start])
    model.minimize(period)
    return solved(model, limit_s)


def durations(layers: Sequence[ExactLayer]) -> dict[Task, int]:
    """Return how long each task takes."""
    return {
        (kind, i): time
        for i, layer in enumerate(layers)
        for kind, time in (
            ("F", layer.forward), ("dO", layer.output_grad), ("dW", layer.weight_grad),
            ("comm", layer.communication), ("U", layer.update),
        )
    }  # fmt: skip


def waits(layers: Sequence[ExactLayer]) -> list[tuple[Task, Task]]:
    """(earlier task, later task) of one step; the next step's F waits for U."""
    pairs: list[tuple[Task, Task]] = []
    for i, layer in enumerate(layers):
        for source in layer.inputs:
            pairs += [(("F", source), ("F", i)), (("dO", i), ("dO", source))]
        chain = [(kind, i) for kind in ("F", "dO", "dW", "comm", "U")]
        pairs += zip(chain, chain[1:], strict=False)
    outputs = set(range(len(layers))) - {source for layer in layers for source in layer.inputs}
    # One loss of all outputs.
    return pairs + [(("F", i), ("dO", j)) for i in outputs for j in outputs if i != j]


def solved(model: CpModel, limit_s: float) -> Optimum:
    """The least that the model allows.  RuntimeError where nothing is found within ``limit_s`` seconds."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.status_name(solver.solve(model))
    if status not in ("OPTIMAL", "FEASIBLE"):
        raise RuntimeError(f"the solver found nothing: {status}")
    return Optimum(round(solver.objective_value), round(solver.best_objective_bound))


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
            layer.forward, layer.output_grad, layer.weight_grad, layer.update,
            weight_bytes=layer.communication, inputs=layer.inputs,
        )
        for layer in layers
    ]  # fmt: skip


def rows(count: int = INSTANCES, seed: int = SEED, evaluations: int = 4000) -> Iterator[dict[str, Any]]:
    """One row for each instance: the optimum, and the period of each policy."""
    draw = random.Random(seed)
    for number in range(count):
        layers = instance(draw)
        exact = optimum(layers)
        row = {"instance": number, "layers": len(layers)}
        row |= {"optimum_s": exact.period, "optimum_bound_s": exact.bound}
        yield row | {
            policy: period_s(policy, layers, evaluations, **options) for policy, options in POLICIES.items()
        }


def period_s(policy: str, layers: Sequence[ExactLayer], evaluations: int, **options: Any) -> float:
    """Simulated seconds of one step."""
    if "slice_bytes" in options:
        options["evaluations"] = evaluations
    table = costs(layers)
    schedule = plan(
        layers=table, schedule=policy, devices=WORKERS, link=LINK, mode="data_parallel", **options
    )
    return simulate(schedule, table, LINK, steps=4).steady_step_s
