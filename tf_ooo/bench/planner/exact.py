"""Optimal data parallel steps by an exact solver (OR-Tools CP-SAT), to judge the searches by.

Formulations of their own, on purpose: nothing of the planner's dependency relation, simulator or search
is used.

- ``cyclic``: one step's tasks have start times, the step is repeated every ``period``, and whatever
  shares a machine (compute, link, updates) must not overlap with itself nor with the two steps that
  follow.  It assumes nothing, so that a dW may also run beside the next step's forward; it takes
  seconds for five layers.
- ``round``: one round from the loss of a step to that of the next.  All forwards end before the loss
  and each waited for its update, so nothing crosses it, and the shortest round is the shortest period.
  A test solves both and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

Task = tuple[str, int]  # kind, layer
_STEPS = 3


@dataclass(frozen=True)
class ExactLayer:
    """Whole numbers of one time unit: F, dO, dW, communication, U; ``inputs``: layers that F reads."""

    forward: int
    output_grad: int
    weight_grad: int
    communication: int
    update: int
    inputs: tuple[int, ...]

    @property
    def durations(self) -> dict[str, int]:
        """By kind of task."""
        times = (self.forward, self.output_grad, self.weight_grad, self.communication, self.update)
        return dict(zip(("F", "dO", "dW", "comm", "U"), times, strict=True))


@dataclass(frozen=True)
class Optimum:
    """What the solver says: the best period found, and the largest that is proved to be a bound."""

    period: int
    bound: int

    @property
    def proved(self) -> bool:
        """Whether the period is optimal."""
        return self.period == self.bound


def optimum(layers: Sequence[ExactLayer], limit_s: float = 10.0, cyclic: bool = False) -> Optimum:
    """The shortest period of a repeated data parallel step.

    Args:
        layers: all of them.
        limit_s: seconds for the solver.
        cyclic: which of the two formulations.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415 - for tests and benchmarks only

    model = cp_model.CpModel()
    horizon = sum(sum(layer.durations.values()) for layer in layers) + 1
    period = model.new_int_var(0, horizon, "period")
    start = {
        (kind, i): model.new_int_var(0, 2 * horizon, f"{kind}{i}")
        for i, layer in enumerate(layers)
        for kind in layer.durations
    }
    for earlier, later, steps in _waits(layers):
        ended = start[earlier] + layers[earlier[1]].durations[earlier[0]]
        if cyclic:
            model.add(start[later] + steps * period >= ended)
        elif steps or earlier[0] != "F" or later[0] != "dO":
            model.add(start[later] >= ended)
    if not cyclic:
        model.add_max_equality(period, [start[task] + layers[task[1]].durations[task[0]] for task in start])
    for kinds in (("F", "dO", "dW"), ("comm",), ("U",)):
        tasks = [task for task in start if task[0] in kinds]
        _one_machine(model, tasks, start, layers, period if cyclic else None)
    model.minimize(period)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.status_name(solver.solve(model))
    if status not in ("OPTIMAL", "FEASIBLE"):
        raise RuntimeError(f"the solver found nothing: {status}")
    return Optimum(round(solver.objective_value), round(solver.best_objective_bound))


def _waits(layers: Sequence[ExactLayer]) -> list[tuple[Task, Task, int]]:
    """(earlier task, later task, steps between them)."""
    waits: list[tuple[Task, Task, int]] = []
    for i, layer in enumerate(layers):
        for source in layer.inputs:
            waits.append((("F", source), ("F", i), 0))
            waits.append((("dO", i), ("dO", source), 0))
        waits.append((("F", i), ("dO", i), 0))
        waits.append((("dO", i), ("dW", i), 0))
        waits.append((("dW", i), ("comm", i), 0))
        waits.append((("comm", i), ("U", i), 0))
        waits.append((("U", i), ("F", i), 1))
    outputs = set(range(len(layers))) - {source for layer in layers for source in layer.inputs}
    # One loss of all outputs.
    waits += [(("F", i), ("dO", j), 0) for i in outputs for j in outputs if i != j]
    return waits


def _one_machine(
    model: CpModel, tasks: list[Task], start: dict[Task, IntVar], layers: Sequence[ExactLayer],
    period: IntVar | None,
) -> None:  # fmt: skip
    """No two tasks at a time, of the same step or, where there is a period, of the next ones."""
    intervals, horizon = [], sum(sum(layer.durations.values()) for layer in layers) + 1
    for kind, i in tasks:
        length = layers[i].durations[kind]
        if not length:
            continue
        for step in range(1 if period is None else _STEPS):
            name = f"{kind}{i}@{step}"
            shifted = model.new_int_var(0, 6 * horizon, f"start {name}")
            model.add(shifted == start[kind, i] + (0 if period is None else step * period))
            intervals.append(model.new_fixed_size_interval_var(shifted, length, name))
    model.add_no_overlap(intervals)
