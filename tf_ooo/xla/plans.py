"""Which dW goes to which stream: the schedules that are compared for a compiled step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grappler_passes.graph import TrainingGraph
from tf_ooo.lowering import TaskOps
from tf_ooo.schedule import Schedule, Task, TaskList
from tf_ooo.xla.regions import Region

MAIN = (0, 0)


def every_layer(
    graph: TrainingGraph, tasks: TaskOps, regions: Mapping[int, list[Region]], streams: int = 1
) -> Schedule:
    """Each dW that can be moved starts as soon as its dO is there, on the side streams in turn.

    The layer that backward reaches last stays on the main stream: nothing is left to run beside it.
    Needs no costs.
    """
    movable = [layer for layer in tasks.backward_layers if layer in regions]
    moved = set(movable) - set(tasks.backward_layers[-1:])
    lanes: dict[tuple[int, int], list[Task]] = {MAIN: []}
    turn = 0
    for layer in tasks.backward_layers:
        for task in (Task("dO", layer), Task("dW", layer)):
            if task not in tasks.ops:
                continue
            lane = MAIN
            if task.kind == "dW" and layer in moved:
                lane, turn = (0, 1 + turn % streams), turn + 1
            lanes.setdefault(lane, []).append(task)
    made: dict[tuple[int, int], Any] = {lane: TaskList(order) for lane, order in lanes.items()}
    return Schedule("single_device", "multi_stream", made)
