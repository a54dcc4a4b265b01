"""Divides devices into replicas of a pipeline: every division, planned and simulated."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError, OptionsError
from tf_ooo.planning.choosing.assumptions import assumptions
from tf_ooo.planning.choosing.figures import one_device_s
from tf_ooo.planning.choosing.on_paper import candidates
from tf_ooo.planning.choosing.plan import Plan, choose
from tf_ooo.planning.model.problem import Problem, less_of_places
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.units import time_text

_MODE = "pipeline"
# Every split assumes this.
AVERAGED = "gradients of replicas are averaged after the step, not beside it"


@dataclass(frozen=True)
class Split:
    """So many replicas of a pipeline, which share a step's micro-batches; ``plan`` None: ``reason`` says why.

    Attributes:
        replicas, devices: of each replica so many devices.
        plan: of one replica.
        allreduce_s: seconds in which the device with most weights averages its gradients, after the step.
    """

    replicas: int
    devices: int
    plan: Plan | None = None
    allreduce_s: float = 0.0
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of one step with all of its micro-batches; infinite where it is impossible."""
        return float("inf") if self.plan is None else self.plan.step_s + self.allreduce_s

    @property
    def over_one_device(self) -> float | None:
        """Return how many times as fast it is as one device that does the work of all replicas."""
        if self.plan is None or not self.step_s:
            return None
        schedule, layers = self.plan.trial.schedule, self.plan.problem.layers
        updates_s = sum(layer.update_s for layer in layers)
        batches_s = one_device_s(schedule, layers) - updates_s
        return (self.replicas * batches_s + updates_s) / self.step_s


def splits(problem: Problem) -> list[Split]:
    """Return every division of the problem's devices, the fastest first; those that are impossible last."""
    counts = [count for count in range(1, problem.devices + 1) if problem.devices % count == 0]
    return sorted(
        (_split(problem, count) for count in counts), key=lambda split: (split.step_s, split.replicas)
    )


def refuse_beside_splits(problem: Problem, schedule: str, mode: str | None) -> None:
    """OptionsError for what no comparison of all divisions has: a schedule, a mode, stages."""
    if schedule != "auto" or mode not in (None, _MODE) or problem.cut:
        raise OptionsError(
            "splits: each division has its own best schedule and cut: no schedule, mode or stages beside it"
        )


def best_split(problem: Problem, table: CostTable | None = None) -> Schedule:
    """Return the schedule of one replica of the fastest division; its ``workers`` are the replicas.

    Its ``predicted_step_s`` includes the averaging, which no task of it is; its ``assumptions`` tell all
    divisions.  OptionsError where none is possible.
    """
    rows = splits(problem)
    best = rows[0]
    if best.plan is None:
        raise OptionsError(f"no division is possible: {'; '.join(dict.fromkeys(row.reason for row in rows))}")
    known = [f"{row.replicas} x {row.devices} {time_text(row.step_s)}" for row in rows if row.plan]
    known += [f"{row.replicas} x {row.devices} impossible" for row in rows if not row.plan]
    said = f"replicas x devices, the fastest is taken: {', '.join(known)}"
    assumed = (*assumptions(problem, table), said, AVERAGED)
    schedule = dataclasses.replace(best.plan.schedule, workers=best.replicas, assumptions=assumed)
    return dataclasses.replace(schedule, predicted_step_s=best.step_s)


def _split(problem: Problem, replicas: int) -> Split:
    devices = problem.devices // replicas
    own, left = divmod(problem.microbatches, replicas)
    if left or not own:
        text = f"{problem.microbatches} micro-batches cannot be dealt out evenly to {replicas} replicas"
        return Split(replicas, devices, reason=text)
    replica = dataclasses.replace(
        problem,
        devices=devices,
        microbatches=own,
        link=problem.link.of_replica(devices, replicas),
        less_bytes=less_of_places(problem.less_bytes, devices),
    )
    try:
        plan = choose(candidates(replica, _MODE))
    except OOOError as error:
        return Split(replicas, devices, reason=str(error))
    held_bytes = max(weight_bytes(plan.trial.schedule, problem).values(), default=0.0)
    return Split(replicas, devices, plan, problem.link.allreduce_s(held_bytes, replicas))


def weight_bytes(schedule: Schedule, problem: Problem) -> Counter[int]:
    """Return bytes of the weights that each device updates."""
    held: Counter[int] = Counter()
    for (device, _), tasks in schedule.lanes.items():
        stages = {task.stage for task in tasks if task.kind == "U"}
        layers = (problem.layers[layer] for stage in stages for layer in schedule.layers_of(stage))
        held[device] += sum(layer.weight_bytes for layer in layers)  # type: ignore[assignment]
    return held
