"""How to divide devices into replicas of a pipeline: every division, planned and simulated."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from tf_ooo.errors import OOOError
from tf_ooo.planning.choosing.figures import one_device_s
from tf_ooo.planning.choosing.on_paper import candidates
from tf_ooo.planning.choosing.plan import Plan, choose
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule

_MODE = "pipeline"


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
        """How many times as fast as one device that does the work of all replicas."""
        if self.plan is None or not self.step_s:
            return None
        schedule, layers = self.plan.trial.schedule, self.plan.problem.layers
        updates_s = sum(layer.update_s for layer in layers)
        batches_s = one_device_s(schedule, layers) - updates_s
        return (self.replicas * batches_s + updates_s) / self.step_s


def splits(problem: Problem) -> list[Split]:
    """Every division of the problem's devices, the fastest first; those that are impossible last."""
    counts = [count for count in range(1, problem.devices + 1) if problem.devices % count == 0]
    return sorted(
        (_split(problem, count) for count in counts), key=lambda split: (split.step_s, split.replicas)
    )


def _split(problem: Problem, replicas: int) -> Split:
    devices = problem.devices // replicas
    own, left = divmod(problem.microbatches, replicas)
    if left or not own:
        text = f"{problem.microbatches} micro-batches cannot be dealt out evenly to {replicas} replicas"
        return Split(replicas, devices, reason=text)
    replica = dataclasses.replace(problem, devices=devices, microbatches=own)
    try:
        plan = choose(candidates(replica, _MODE))
    except OOOError as error:
        return Split(replicas, devices, reason=str(error))
    held_bytes = max(weight_bytes(plan.trial.schedule, problem).values(), default=0.0)
    return Split(replicas, devices, plan, problem.link.allreduce_s(held_bytes, replicas))


def weight_bytes(schedule: Schedule, problem: Problem) -> Counter[int]:
    """Bytes of the weights that each device updates."""
    held: Counter[int] = Counter()
    for (device, _), tasks in schedule.lanes.items():
        stages = {task.stage for task in tasks if task.kind == "U"}
        layers = (problem.layers[layer] for stage in stages for layer in schedule.layers_of(stage))
        held[device] += sum(layer.weight_bytes for layer in layers)  # type: ignore[assignment]
    return held
