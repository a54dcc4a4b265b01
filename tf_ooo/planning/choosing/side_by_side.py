"""Several replicas of a pipeline side by side, on devices of their own: what their step takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_ooo.costs.layer_costs import LayerCosts, Link, layer_inputs
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList


def side_by_side(
    schedule: Schedule, layers: Sequence[LayerCosts], replicas: int
) -> tuple[Schedule, tuple[LayerCosts, ...]]:
    """One schedule that has the tasks of all replicas, and its stages' costs.

    Args:
        schedule: of one replica.
        layers: of its stages, one for each.
        replicas: so many; those after the first have the devices and the stages behind the first's.
    """
    count, devices = len(layers), 1 + max((device for device, _ in schedule.lanes), default=0)

    def of_replica(number: int, task: Task) -> Task:
        return dataclasses.replace(task, stage=task.stage + number * count)

    numbers = range(replicas)
    lanes = {
        (device + number * devices, stream): TaskList([of_replica(number, task) for task in tasks])
        for number in numbers
        for (device, stream), tasks in schedule.lanes.items()
    }
    together = dataclasses.replace(
        schedule,
        lanes=lanes,
        stages=tuple((stage, stage) for stage in range(replicas * count)),
        parts={(k, s + n * count): shares for n in numbers for (k, s), shares in schedule.parts.items()},
        after=tuple(
            (of_replica(n, task), of_replica(n, other), steps)
            for n in numbers
            for task, other, steps in schedule.after
        ),
        priority_lanes=frozenset((d + n * devices, s) for n in numbers for d, s in schedule.priority_lanes),
        workers=1,
        predicted_step_s=None,
        predicted_peak_bytes=None,
    )
    inputs = [layer_inputs(tuple(layers), stage) for stage in range(count)]
    return together, tuple(
        dataclasses.replace(layer, inputs=tuple(source + number * count for source in inputs[stage]))
        for number in numbers
        for stage, layer in enumerate(layers)
    )


def exchange_s(weight_bytes: float, replicas: int, link: Link) -> float:
    """Seconds in which a device sends and receives gradients and weights; each replica holds a part.

    Gradients go to who holds the weights, which come back: as much as a ring allreduce moves, scattering and
    gathering (ZeRO, arXiv 1910.02054, section 7.1).
    """
    moved_bytes = 4 * weight_bytes * (replicas - 1) / replicas  # two ways, gradients and weights
    return link.allreduce_s(weight_bytes, replicas) + moved_bytes * link.overhead_s_per_byte
