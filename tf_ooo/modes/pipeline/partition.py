"""Cuts a model into stages: by measured seconds, by bytes to be sent, and by memory.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts, Link, layer_inputs
from tf_ooo.errors import OptionsError, ScheduleError
from tf_ooo.planning.building.pipeline import cheapest, shortest_s
from tf_ooo.planning.building.stages import Bounds
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.model.schedule_file import ScheduleFile
from tf_ooo.planning.simulation.simulator import validate

# A schedule of the user's own, in a file: whether a fit can run it, and how it is cut.

# A step of a fit does not have these: fields of a schedule, and words in its file.
_NOT_RUN = ("asynchronous", "parts", "after")


def check_own(file: ScheduleFile, devices: int, microbatches: int, replicas: int) -> None:
    """Raise ScheduleError, with the file's line, if a fit with these options cannot run the schedule.

    Stages are checked as a chain: an order without deadlock in a chain has none in any model.
    """
    schedule = file.schedule
    if schedule.mode != "pipeline":
        raise file.error(f"mode {schedule.mode}: a pipeline runs 'mode pipeline' only", "mode")
    for name in _NOT_RUN:
        if getattr(schedule, name):
            raise file.error(f"{name}: a fit runs no such schedule; leave the line out", name)
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
    _check_lanes(file)
    _check_tasks(file)


def stages_of(schedule: Schedule) -> int:
    """Return the number of stages."""
    return len(schedule.stages) or 1 + max((task.stage for task in schedule.tasks), default=0)


def check_layers(file: ScheduleFile, layers: int) -> None:
    """Raise ScheduleError if the file's stages hold other layers than the model."""
    stages = file.schedule.stages
    held = stages[-1][1] + 1
    if held != layers:
        raise file.error(
            f"stages hold {held} layers, the model has {layers} (report.layers): end with layer {layers - 1},"
            " or leave the 'stage' lines out and the model is cut by costs",
            f"stage {len(stages) - 1}",
        )


def check_recomputed(file: ScheduleFile, layers: int, fixed: Collection[int]) -> None:
    """Raise ScheduleError for layers that do not exist or cannot run again."""
    for layer in file.schedule.recompute:
        if layer >= layers:
            raise file.error(f"recompute {layer}: the model has {layers} layers, from 0", "recompute")
        if layer in fixed:
            raise file.error(
                f"recompute {layer}: this layer has a loop or random numbers and cannot run again",
                "recompute",
            )


def as_run(schedule: Schedule, count: int) -> Schedule:
    """Return the schedule of a step with ``count`` micro-batches, or fewer; each stage is one layer."""
    lanes = {
        lane: TaskList([task for task in tasks if task.microbatch < count])
        for lane, tasks in schedule.lanes.items()
    }
    return dataclasses.replace(
        schedule,
        lanes=lanes,
        microbatches=count,
        stages=tuple((stage, stage) for stage in range(stages_of(schedule))),
        recompute=(),  # that is a matter of the stages' costs
        workers=1,
        predicted_step_s=None,
        predicted_peak_bytes=None,
    )


def _check_lanes(file: ScheduleFile) -> None:
    """Check for one lane for each device, in its order, and each stage on one device."""
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
    """Check that every task is there, and none waits for itself."""
    schedule, count = file.schedule, file.schedule.microbatches
    number, there = stages_of(schedule), set(schedule.tasks)
    for stage in range(number):
        batches = itertools.product(range(count), ("F", "dO", "dW"))
        needed = [*(Task(kind, stage, batch) for batch, kind in batches), Task("U", stage)]
        for task in (task for task in needed if task not in there):
            raise file.located(
                ScheduleError(f"missing: {task}; a fit needs F, dO and dW of each micro-batch, and U")
            )
    try:
        validate(as_run(schedule, count), [LayerCosts(1.0, 1.0, 1.0, 1.0)] * number)
    except ScheduleError as error:
        raise file.located(error) from error


# The slowest stage may be so much slower than in the best cut, for less to send.
_SLACK = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6)


def units_of(layers: int, inseparable: Sequence[tuple[int, int]]) -> Bounds:
    """Return the smallest ranges of layers that may be cut from each other."""
    units: list[tuple[int, int]] = []
    for layer in range(layers):
        joined = any(first < layer <= last for first, last in inseparable)
        if units and joined:
            units[-1] = (units[-1][0], layer)
        else:
            units.append((layer, layer))
    return tuple(units)


@dataclass(frozen=True)
class Cutter:
    """Cuts layers, with costs of one micro-batch, into stages; ``units`` are ranges that stay whole."""

    layers: tuple[LayerCosts, ...]
    units: Bounds
    link: Link
    microbatches: int
    # Policies ask for the same stages.
    _cuts: dict[tuple[float, ...], Bounds] = field(default_factory=dict, compare=False, repr=False)

    def cut(self, devices: tuple[int, ...]) -> Bounds:
        """Return (first, last) layer of each stage: the best of several cuts with a short slowest stage.

        ``devices``: the device number of each stage.  The step is estimated as all micro-batches on the
        slowest stage, plus the first one's messages.
        """
        speeds = self.link.speeds_of(devices)
        if speeds not in self._cuts:
            self._cuts[speeds] = self._cut(speeds)
        return self._cuts[speeds]

    def _cut(self, speeds: tuple[float, ...]) -> Bounds:
        sums, messages = self._sums(len(speeds), lambda layer: layer.busy_s), self._messages_s
        limit = shortest_s(sums, speeds)
        cuts = [cheapest(sums, messages, speeds, limit * slack) for slack in _SLACK]

        def step_s(ends: Sequence[int]) -> float:
            stages = zip([0, *ends], ends, speeds, strict=False)
            longest = max((sums[b] - sums[a]) / speed for a, b, speed in stages)
            sent = [messages[end - 1] for end in ends[:-1]]
            return float(max([longest, *sent]) * self.microbatches + sum(sent))

        return self._stages(min((ends for ends in cuts if ends), key=step_s))

    def cut_along_branches(self, devices: tuple[int, ...]) -> tuple[Bounds, ...]:
        """Return the cut by time in which no stage holds parts of two branches; (): no branches.

        A branch that takes less than half a stage does not count.
        """
        starts = self._branch_starts(len(devices))
        parts = list(itertools.pairwise([0, *starts, len(self.units)]))
        sums = self._sums(len(devices), lambda layer: layer.busy_s)
        counts = [1] * len(parts)
        while sum(counts) < len(devices):
            slowest = [
                (sums[b] - sums[a]) / n if n < b - a else -1.0
                for (a, b), n in zip(parts, counts, strict=True)
            ]
            counts[int(np.argmax(slowest))] += 1
        if not starts or sum(counts) > len(devices):
            return ()
        ends, left = list[int](), list(self.link.speeds_of(devices))
        for (first, after), count in zip(parts, counts, strict=True):
            speeds, left = left[:count], left[count:]
            own, messages = sums[first : after + 1] - sums[first], self._messages_s[first:after]
            ends += [first + end for end in cheapest(own, messages, speeds, shortest_s(own, speeds))]
        return (self._stages(ends),)

    def _branch_starts(self, stages: int) -> list[int]:
        """Return the units at which a branch begins that can run beside the layers right before it."""
        upstream: list[int] = []
        for layer in range(len(self.layers)):
            bits = (upstream[source] | 1 << source for source in layer_inputs(self.layers, layer))
            upstream.append(functools.reduce(operator.or_, bits, 0))
        seconds = [layer.busy_s for layer in self.layers]
        least_s = sum(seconds) / stages / 2

        def begins(start: int) -> bool:
            beside = itertools.takewhile(
                lambda i: not upstream[i] >> start - 1 & 1, range(start, len(seconds))
            )
            before = itertools.takewhile(lambda i: not upstream[start] >> i & 1, range(start - 1, -1, -1))
            return all(sum(seconds[i] for i in layers) >= least_s for layers in (beside, before))

        return [unit for unit, (first, _) in enumerate(self.units) if unit and begins(first)]

    def cut_by_bytes(self, rooms: Sequence[float]) -> tuple[Bounds, ...]:
        """Return cuts whose fullest stage uses the least share of its memory.

        The first counts weights, gradients and slots only; the second adds the activations of one
        micro-batch, the third those of all.
        """
        cuts, messages = [], self._messages_s
        for kept in sorted({0, 1, self.microbatches}):
            sums = self._sums(len(rooms), functools.partial(held_bytes, kept))
            cuts.append(cheapest(sums, messages, rooms, shortest_s(sums, rooms)))
        return tuple(dict.fromkeys(self._stages(ends) for ends in cuts if ends))

    def _sums(self, stages: int, of_layer: Callable[[LayerCosts], float]) -> np.ndarray:
        """Return sums over the units before each unit, and over all. OptionsError: more stages than units."""
        if stages > len(self.units):
            whole = "" if len(self.units) == len(self.layers) else " that can be cut (a loop stays whole)"
            raise OptionsError(
                f"{stages} stages are more than the {len(self.units)} layers{whole}; use fewer devices"
            )
        return np.cumsum([0.0, *(sum(map(of_layer, self.layers[a : b + 1])) for a, b in self.units)])

    @functools.cached_property
    def _messages_s(self) -> np.ndarray:
        """Return the seconds of messages across the cut behind each unit, there and back."""
        link = self.link.of_idle_ends
        return np.array([2 * link.seconds(crossing_bytes(self.layers, last)) for _, last in self.units])

    def _stages(self, ends: Sequence[int]) -> Bounds:
        """Return (first, last) layer of each stage, given the ends of its units."""
        starts = [0, *ends[:-1]]
        return tuple((self.units[a][0], self.units[b - 1][1]) for a, b in zip(starts, ends, strict=True))


def held_bytes(kept: int, layer: LayerCosts) -> float:
    """Return the bytes of weights, gradients, slots, and the activations of so many micro-batches."""
    return 2 * layer.weight_bytes + layer.slot_bytes + kept * layer.activation_bytes


def crossing_bytes(layers: tuple[LayerCosts, ...], last: int) -> float:
    """Return the bytes that layers behind ``last`` read from layers up to it."""
    read = {s for i in range(last + 1, len(layers)) for s in layer_inputs(layers, i) if s <= last}
    return float(sum(layers[source].output_bytes for source in read))
