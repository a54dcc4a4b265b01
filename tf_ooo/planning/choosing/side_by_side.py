"""Several replicas of a pipeline side by side, on devices of their own: what their step takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.costs.layer_costs import LayerCosts, Link, layer_inputs
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList


def side_by_side(
    schedule: Schedule, layers_of: Sequence[Sequence[LayerCosts]]
) -> tuple[Schedule, tuple[LayerCosts, ...]]:
    """One schedule that has the tasks of all replicas, and its stages' costs.

    Args:
        schedule: of one replica.
        layers_of: of each replica its stages, one layer for each; those after the first have the devices and
            the stages behind the first's.
    """
    layers, numbers = layers_of[0], range(len(layers_of))
    count, devices = len(layers), schedule.devices

    def of_replica(number: int, task: Task) -> Task:
        return dataclasses.replace(task, stage=task.stage + number * count)

    lanes = {
        (device + number * devices, stream): TaskList([of_replica(number, task) for task in tasks])
        for number in numbers
        for (device, stream), tasks in schedule.lanes.items()
    }
    together = dataclasses.replace(
        schedule,
        lanes=lanes,
        stages=tuple((stage, stage) for stage in range(len(numbers) * count)),
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
        for stage, layer in enumerate(layers_of[number])
    )


def held_evenly(device_of_layer: Sequence[int], bytes_of_layer: Sequence[float], replicas: int) -> list[int]:
    """Deal each device's layers out to replicas that hold about as many bytes each, the largest layer first.

    ``device_of_layer``: by number, of one replica; it may have several stages.
    """
    held = {(device, replica): 0.0 for device in set(device_of_layer) for replica in range(replicas)}
    holders = [0] * len(device_of_layer)
    for layer in sorted(range(len(device_of_layer)), key=lambda layer: (-bytes_of_layer[layer], layer)):
        device = device_of_layer[layer]
        holder = min(range(replicas), key=lambda replica: (held[device, replica], replica))
        holders[layer] = holder
        held[device, holder] += bytes_of_layer[layer]
    return holders


@dataclass(frozen=True)
class StageShare:
    """Says what one replica's device holds of a stage, and what it does for that once a step.

    Attributes:
        weight_bytes: of the layers that it holds; ``stage_bytes``: of all of the stage.
        slot_bytes, update_s: of the layers that it holds.
        largest_bytes: of the largest of them; as much takes a sum of two gradients.
        replicas: that share the stage.
    """

    weight_bytes: float
    stage_bytes: float
    slot_bytes: float
    update_s: float
    largest_bytes: float
    replicas: int

    def exchange_s(self, link: Link) -> float:
        """Return seconds in which the device sends and receives gradients and weights.

        Gradients go to who holds the weights, which come back (ZeRO, arXiv 1910.02054, section 7.1): where
        all hold the same, as much as a ring allreduce moves.  It sends as many bytes as it receives.
        """
        if self.replicas == 1:
            return 0.0
        moved_bytes = self.stage_bytes - self.weight_bytes + (self.replicas - 1) * self.weight_bytes
        computing_s = 2 * moved_bytes * link.overhead_s_per_byte
        return 2 * link.of_idle_ends.latency_s + link.occupied_s(moved_bytes) + computing_s

    @property
    def bytes(self) -> float:
        """Slots, and the others' gradients, which come as soon as they are there."""
        return self.slot_bytes + (self.replicas - 1) * self.weight_bytes


def stage_shares(
    layers: Sequence[LayerCosts], stage_of_layer: Sequence[int], holders: Sequence[int], replicas: int
) -> list[list[StageShare]]:
    """Return for each replica what its device holds of each stage."""

    def share(replica: int, stage: int) -> StageShare:
        of_stage = [number for number, at in enumerate(stage_of_layer) if at == stage]
        own = [layers[number] for number in of_stage if holders[number] == replica]
        return StageShare(
            sum(layer.weight_bytes for layer in own),
            sum(layers[number].weight_bytes for number in of_stage),
            sum(layer.slot_bytes for layer in own),
            sum(layer.update_s for layer in own),
            max((layer.weight_bytes for layer in own), default=0.0),
            replicas,
        )

    stages = range(max(stage_of_layer) + 1)
    return [[share(replica, stage) for stage in stages] for replica in range(replicas)]
