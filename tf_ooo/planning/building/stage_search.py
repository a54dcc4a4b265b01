"""Searches cuts, the device of each stage and the order of all tasks together: every change is simulated.

Each layer has a device, and neighbours on one device are a stage, so that one change moves a cut, a stage or
several.  The order is kept: tasks that ended first before a change are urgent after it, and double
justification (step_tasks.py) closes gaps.  Orders above the memory limit are run again within it
(within_room.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.building.pipeline import StagedLayers, balanced
from tf_ooo.planning.building.stages import Bounds, one_each, stage_of_layer
from tf_ooo.planning.building.step_tasks import KINDS, StepTasks, justified, justified_each
from tf_ooo.planning.building.v_shape import v_places
from tf_ooo.planning.building.walk import walk
from tf_ooo.planning.building.within_room import Room
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Floats, Ints
from tf_ooo.planning.simulation.clock import Times

# Stages on each device, at most: each one sends what the next one reads.
_CHUNKS = 4
# Acceptance threshold of the walk.
_TOLERANCE = 0.004
_ROUNDS = 3
# Up to these shares, changes move a cut, give layers away, exchange two stages; the rest stir the order.
_CUT, _GIVEN, _EXCHANGED = 0.35, 0.55, 0.8
# If links differ or weights are tied, this share of the exchanges is of all stages of two devices.
_DEVICES_EXCHANGED = 0.3
_UNITS_AT_ONCE = (1, 1, 2, 3)
# Ends are stirred by so many times a mean task, normally distributed.
_STIRRED = (0.5, 1.0, 2.0, 4.0)
_KEPT_TASKS = 64
# So many assignments are all looked at.
_MOST_OWNERS = 300
# Changes that are drawn until one may help.
_DRAWS = 30

# The device of each unit: of each layer, or of each stage that is given.
Owner = tuple[int, ...]


@dataclass(frozen=True)
class Assigned:
    """Holds the device of each unit, and the order that was found for these devices.

    ``search``: where it was found.
    ``end_s``: when F, dO and dW of a unit's stage end, float64 (3, units, micro-batches).
    ``over_bytes``: how far the worst device is above its memory limit.
    """

    search: StageSearch
    owner: Owner
    stages: StagedLayers
    tasks: StepTasks
    times: Times
    end_s: Floats
    over_bytes: float

    @property
    def within_s(self) -> float:
        """Return the makespan; infinity above the memory limit."""
        return self.times.makespan_s if self.over_bytes <= 0 else float("inf")

    @property
    def rank(self) -> tuple[float, float]:
        """Return the bytes above the memory limit, then the makespan: the lowest is the best."""
        return max(self.over_bytes, 0.0), self.times.makespan_s

    def schedule(self, policy: str) -> Schedule:
        return self.stages.with_updates(policy, self.tasks.orders(self.stages.place, self.times))


def _by_bytes_too(layers: Sequence[LayerCosts]) -> list[float]:
    """Return each layer's share of the seconds plus its share of the bytes kept."""
    seconds = np.array([layer.busy_s for layer in layers])
    kept = np.array([max(layer.stored_bytes, layer.kept_bytes) for layer in layers])
    shares: list[float] = (seconds / (seconds.sum() or 1.0) + kept / (kept.sum() or 1.0)).tolist()
    return shares


class StageSearch:
    """Looks for the fastest assignment, always the same for the same costs.

    A problem that is cut already keeps its stages: only their devices change.
    ``in_flight``: the most micro-batches of a stage between F and dW.
    ``found``: the best order of each assignment that was looked at, where the problem is ``small``.
    ``waits``: orders above the memory limit run again within it, and cuts by bytes are tried, too.
    """

    def __init__(self, problem: Problem, in_flight: int, small: bool = False, waits: bool = False) -> None:
        self.problem, self.in_flight, self.small, self.waits = problem, in_flight, small, waits
        self.found: dict[Owner, Assigned] = {}
        self.random, self.noise = random.Random(0), np.random.default_rng(0)
        self.units = problem.cut or one_each(problem.layers)
        self.ends = np.array([last for _, last in self.units])
        seconds = StagedLayers(problem, self.units).sums("busy_s")
        self.work_s: Floats = seconds * problem.microbatches
        self.task_s = float(seconds.mean()) / len(KINDS)
        self.speeds = np.array(problem.link.speeds_of(range(problem.devices)))
        self.places_matter = problem.link.near is not None or any(layer.tied for layer in problem.layers)
        self.most = max(_CHUNKS * problem.devices, len(problem.cut))
        self._tasks: dict[tuple[Bounds, tuple[float, ...], tuple[int, ...]], StepTasks] = {}

    def starts(self, most: int | None = None) -> Iterator[Assigned]:
        """Yield the first ``most`` cuts and placements, each once, with an order."""
        owners = itertools.chain.from_iterable(map(self._with_ends_together, self._owners()))
        return map(self.ordered, itertools.islice(dict.fromkeys(owners), most))

    def run(self, start: Assigned, changes: int) -> Assigned:
        """Return the best on a walk of so many changes; on one device nothing can be changed."""
        if self.problem.devices == 1:
            return start
        bound_s = self.work_s.sum() / self.speeds.sum() * (1 + 1e-9)
        turns = (1 - number / changes for number in range(changes))
        return walk(
            start, self._changed, attrgetter("within_s"), turns, bound_s=bound_s, tolerance=_TOLERANCE
        )

    def ordered(self, owner: Owner, rounds: int = _ROUNDS) -> Assigned:
        """Return these devices with an order of their own."""
        stages = self._stages(owner)
        runs = justified_each(self._tasks_of(stages), stages.place, rounds)
        first, *others = sorted(runs, key=attrgetter("makespan_s"))
        best = self._assigned(owner, stages, first)
        for times in others if self.waits else ():
            if times.makespan_s < best.within_s:
                best = min(best, self._assigned(owner, stages, times), key=attrgetter("rank"))
        return best

    def shuffled(self, here: Assigned, count: int) -> Iterator[Assigned]:
        """Yield so many random orders on the same devices, in which no device waits while a task is ready."""
        for _ in range(count):
            urgent = self.random.sample(here.tasks.urgent, len(here.tasks.urgent))
            yield self._assigned(here.owner, here.stages, here.tasks.run(here.stages.place, urgent))

    def _owners(self) -> Iterator[Owner]:
        """Yield devices to begin with: one to four stages on each, dealt out in turn or there and back."""
        devices, layers = self.problem.devices, self.problem.layers
        if self.problem.cut:
            yield tuple(stage % devices for stage in range(len(self.units)))
            return
        if self.small and devices ** (len(self.units) - 1) <= _MOST_OWNERS:
            owners = itertools.product(range(devices), repeat=len(self.units))
            # To exchange two devices that are alike changes nothing.
            alike = len(set(self.speeds)) == 1 and self.problem.link.near is None
            in_turn = list(range(devices))
            for owner in owners:
                seen = list(dict.fromkeys(owner))
                if seen == in_turn or (not alike and len(seen) == devices):
                    yield owner
        weights = [None, _by_bytes_too(layers)] if self.waits else [None]
        chunks_of_each = range(1, min(_CHUNKS, len(layers) // devices) + 1)
        for weight, chunks, row in itertools.product(weights, chunks_of_each, self._rows()):
            back = [] if chunks % 2 else [v_places(devices) * (chunks // 2)]
            for places in [tuple(range(devices)) * chunks, *back]:
                place = [row[number] for number in places]
                bounds = balanced(layers, self.problem.link.speeds_of(place), weight)
                yield tuple(place[stage] for stage in stage_of_layer(bounds))

    def _with_ends_together(self, owner: Owner) -> Iterator[Owner]:
        """Yield the devices, and with tied weights those where they and what uses them are on one."""
        yield owner
        unit_of = stage_of_layer(self.units)
        here, there = list(owner), list(owner)
        for number, layer in enumerate(self.problem.layers):
            for source, _ in layer.tied:
                here[unit_of[number]], there[unit_of[source]] = here[unit_of[source]], there[unit_of[number]]
        yield from (tuple(moved) for moved in (here, there) if set(moved) == set(owner))

    def _rows(self) -> list[list[int]]:
        """Return the devices as they are listed and, if their links differ, with near ones side by side."""
        listed, link = list(range(self.problem.devices)), self.problem.link
        if link.near is None:
            return [listed]
        size_bytes = float(np.mean([layer.output_bytes for layer in self.problem.layers]))
        row, left = listed[:1], listed[1:]
        while left:
            row.append(min(left, key=lambda device: link.between(row[-1], device).seconds(size_bytes)))
            left.remove(row[-1])
        return [listed, row]

    def _stages(self, owner: Owner) -> StagedLayers:
        """Merge neighbouring units on one device into stages, but keep stages that are given."""
        starts = [
            unit
            for unit, device in enumerate(owner)
            if self.problem.cut or not unit or device != owner[unit - 1]
        ]
        ends = [*starts[1:], len(owner)]
        bounds = tuple(
            (self.units[start][0], self.units[end - 1][1]) for start, end in zip(starts, ends, strict=True)
        )
        return StagedLayers(self.problem, bounds, tuple(owner[start] for start in starts))

    def _stage_of(self, stages: StagedLayers) -> Ints:
        """Return the stage of each unit."""
        numbers: Ints = np.searchsorted([last for _, last in stages.bounds], self.ends)
        return numbers

    def _tasks_of(self, stages: StagedLayers) -> StepTasks:
        """Return the tasks of these stages, with the devices' speeds and, where they take time, messages."""
        link = self.problem.link
        place = stages.place if link.busies_ends or self.places_matter else ()
        key = stages.bounds, link.speeds_of(stages.place), place
        if key not in self._tasks:
            if len(self._tasks) >= _KEPT_TASKS:
                self._tasks.pop(next(iter(self._tasks)))
            self._tasks[key] = StepTasks(stages, self.in_flight)
        return self._tasks[key]

    def _assigned(self, owner: Owner, stages: StagedLayers, times: Times) -> Assigned:
        tasks = self._tasks_of(stages)
        over_bytes = -1.0
        if self.problem.memory_limit_bytes is not None:
            room = Room(stages)
            over_bytes = room.over_bytes(tasks, times)
            if self.waits and over_bytes > 0 and room.for_one:
                times = room.kept_by(tasks, times)
                over_bytes = room.over_bytes(tasks, times)
        ends_s: Floats = np.array(times.end_s).reshape(tasks.numbers.shape)[:, self._stage_of(stages)]
        assigned = Assigned(self, owner, stages, tasks, times, ends_s, over_bytes)
        if self.small and (owner not in self.found or assigned.within_s < self.found[owner].within_s):
            self.found[owner] = assigned
        return assigned

    def _changed(self, here: Assigned) -> Assigned | None:
        """Return a neighbour with its order; None where none is found that may be as fast."""
        for _ in range(_DRAWS):
            kind = self.random.random()
            if kind >= _EXCHANGED:
                return self._like(here, here.owner, self.task_s * self.random.choice(_STIRRED))
            owner = self._moved(here, kind)
            if owner != here.owner and self._may_help(owner, here):
                return self._like(here, owner)
        return None

    def _may_help(self, owner: Owner, here: Assigned) -> bool:
        """Return whether every device has work, and none has too much."""
        longest_s = (np.bincount(owner, self.work_s, self.problem.devices) / self.speeds).max()
        all_busy = len(set(owner)) == self.problem.devices
        return all_busy and bool(longest_s < here.times.makespan_s * (1 + _TOLERANCE))

    def _like(self, here: Assigned, owner: Owner, stirred_s: float = 0.0) -> Assigned | None:
        """Return other devices with the same order, if possible; its ends vary by about ``stirred_s``."""
        stages = self._stages(owner)
        if len(stages.bounds) > self.most:
            return None
        # An F of a stage ends with its last unit's, a dO and a dW with its first one's.
        units = np.searchsorted(self.ends, np.array(stages.bounds))
        end_s = np.concatenate([here.end_s[:1, units[:, 1]], here.end_s[1:, units[:, 0]]])
        if stirred_s:
            end_s = end_s + self.noise.normal(0.0, stirred_s, end_s.shape)
        times = justified(self._tasks_of(stages), stages.place, Times([], end_s.ravel().tolist(), []))
        # Within the limit it would hardly be shorter; of a small problem all are kept.
        too_long = times.makespan_s > here.times.makespan_s * (1 + _TOLERANCE)
        return None if too_long and not self.small else self._assigned(owner, stages, times)

    def _moved(self, here: Assigned, kind: float) -> Owner:
        """Change some devices: at a cut, of a few units, or of two stages; or exchange unlike devices."""
        owner, draw, count = list(here.owner), self.random, len(here.owner)
        if kind < _CUT:
            cuts = [unit for unit in range(1, count) if owner[unit] != owner[unit - 1]]
            behind = draw.choice(cuts)
            to, of = draw.sample((behind - 1, behind), 2)
            owner[to] = owner[of]
        elif kind < _GIVEN:
            first = draw.randrange(count)
            last = min(count, first + draw.choice(_UNITS_AT_ONCE))
            owner[first:last] = [draw.randrange(self.problem.devices)] * (last - first)
        elif self.places_matter and draw.random() < _DEVICES_EXCHANGED:
            one, other = draw.sample(range(self.problem.devices), 2)
            exchanged = {one: other, other: one}
            owner = [exchanged.get(device, device) for device in owner]
        else:
            place = here.stages.place
            first_stage, second_stage = draw.sample(range(len(place)), 2)
            swapped = {first_stage: place[second_stage], second_stage: place[first_stage]}
            numbers = self._stage_of(here.stages).tolist()
            owner = [swapped.get(stage, device) for stage, device in zip(numbers, owner, strict=True)]
        return tuple(owner)
