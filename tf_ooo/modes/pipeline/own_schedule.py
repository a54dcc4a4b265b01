"""A schedule of the user's own, in a file: whether a fit can run it, and how it is cut.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.model.schedule_file import ScheduleFile
from tf_ooo.planning.simulation.validate import validate

# A step of a fit does not have these: fields of a schedule, and words in its file.
_NOT_RUN = ("asynchronous", "parts", "after")
_PLAIN = Schedule("pipeline", "plain")


def check_own(file: ScheduleFile, devices: int, microbatches: int, replicas: int) -> None:
    """ScheduleError, with the file's line, for what a fit with these options cannot run.

    Stages are checked as a chain: whatever waits for no other in a chain waits for none in any model.
    """
    schedule = file.schedule
    if schedule.mode != "pipeline":
        raise file.error(f"mode {schedule.mode}: a pipeline runs 'mode pipeline' only", "mode")
    for name in _NOT_RUN:
        if getattr(schedule, name) != getattr(_PLAIN, name):
            raise file.error(f"{name}: a fit runs no such schedule; leave the line out", name)
    _check_counts(file, devices, microbatches, replicas)
    _check_lanes(file)
    _check_tasks(file)


def stages_of(schedule: Schedule) -> int:
    """Count the stages."""
    return len(schedule.stages) or 1 + max((task.stage for task in schedule.tasks), default=0)


def check_layers(file: ScheduleFile, layers: int) -> None:
    """ScheduleError where the file's stages hold other layers than those of the model."""
    held = file.schedule.stages[-1][1] + 1
    if held != layers:
        last = len(file.schedule.stages) - 1
        raise file.error(
            f"stages hold {held} layers, the model has {layers} (report.layers): end with layer {layers - 1},"
            " or leave the 'stage' lines out and the model is cut by costs",
            f"stage {last}",
        )


def check_recomputed(file: ScheduleFile, layers: int, fixed: Collection[int]) -> None:
    """ScheduleError for layers that there are not, or that cannot run again."""
    for layer in file.schedule.recompute:
        if layer >= layers:
            raise file.error(f"recompute {layer}: the model has {layers} layers, from 0", "recompute")
        if layer in fixed:
            raise file.error(
                f"recompute {layer}: this layer has a loop or random numbers and cannot run again",
                "recompute",
            )


def as_run(schedule: Schedule, count: int) -> Schedule:
    """The schedule of a step with ``count`` micro-batches, which may be fewer; each stage as one layer.

    What runs again is a matter of the stages' costs.
    """
    number = stages_of(schedule)
    lanes = {
        lane: TaskList([task for task in tasks if task.microbatch < count])
        for lane, tasks in schedule.lanes.items()
    }
    stages = tuple((stage, stage) for stage in range(number))
    return dataclasses.replace(
        schedule,
        lanes=lanes,
        microbatches=count,
        stages=stages,
        recompute=(),
        workers=1,
        predicted_step_s=None,
        predicted_peak_bytes=None,
    )


def _check_counts(file: ScheduleFile, devices: int, microbatches: int, replicas: int) -> None:
    schedule = file.schedule
    if schedule.microbatches != microbatches:
        raise file.error(
            f"microbatches {schedule.microbatches}: the fit has microbatches={microbatches}; give "
            f"microbatches={schedule.microbatches}, or another file",
            "microbatches",
        )
    if schedule.workers not in (1, replicas):
        raise file.error(
            f"workers {schedule.workers}: the fit has {replicas}; give replicas={schedule.workers}, with as "
            f"many times the devices (or horovodrun -np {schedule.workers}), or leave the line out",
            "workers",
        )
    used = sorted({device for device, _ in schedule.lanes})
    if used != list(range(devices)):
        numbers = ", ".join(map(str, used[:10])) or "none"
        raise file.error(
            f"lanes of devices {numbers}: the fit has {devices}, each with a lane, from 0 to {devices - 1}; "
            f"give devices={len(used)}, or another file",
            "lane",
        )


def _check_lanes(file: ScheduleFile) -> None:
    """One lane for each device, in its order; each stage on one device."""
    schedule = file.schedule
    place_of: dict[int, int] = {}
    for (device, stream), tasks in schedule.lanes.items():
        begins = f"lane {device} {stream}"
        if stream or (device, stream) in schedule.priority_lanes:
            raise file.error(
                f"{begins}: a fit runs one lane on each device, in its order: write 'lane {device} 0:'",
                begins,
            )
        for task in tasks:
            if task.kind == "comm":
                raise file.error(
                    f"{task}: gradients of replicas are averaged without such tasks; leave it out", begins
                )
            if place_of.setdefault(task.stage, device) != device:
                raise file.error(
                    f"{task}: stage {task.stage} has tasks on device {place_of[task.stage]}, too; all of a "
                    "stage are on the device that has its weights",
                    begins,
                )


def _check_tasks(file: ScheduleFile) -> None:
    """Every task is there, and none waits for itself."""
    number, there = stages_of(file.schedule), set(file.schedule.tasks)
    for stage in range(number):
        batches = itertools.product(range(file.schedule.microbatches), ("F", "dO", "dW"))
        needed = [*(Task(kind, stage, batch) for batch, kind in batches), Task("U", stage)]
        for task in (task for task in needed if task not in there):
            raise file.located(
                ScheduleError(f"missing: {task}; a fit needs F, dO and dW of each micro-batch, and U")
            )
    stages = tuple((stage, stage) for stage in range(number))
    each_one_layer = dataclasses.replace(file.schedule, stages=stages, recompute=())
    try:
        validate(each_one_layer, [LayerCosts(1.0, 1.0, 1.0, 1.0)] * number)
    except ScheduleError as error:
        raise file.located(error) from error
