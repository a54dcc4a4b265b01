"""Makes V-shaped pipelines (arXiv 2405.15362, section 3): building blocks, squeezed for the real costs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tf_ooo.planning.building.choice import on_paper, rank, within_limit
from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import KINDS, StepTasks
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task

# Building blocks of V-shaped pipelines (arXiv 2405.15362, section 3): stages s and 2p-1-s are on device s. A
# block says at which tick one micro-batch's F, F, dO and dO run on each device; it is repeated some ticks
# later, and dW go where a device is free. Longer blocks store more activations and leave fewer bubbles.

# F, dO and dW of two stages: a device is busy all the time if blocks follow each other this closely.
FULL_PERIOD = 6
_GAPS = 6


@dataclass(frozen=True)
class Steps:
    """Holds ticks from one device to the next: of F down, F back, dO down and dO back (section 3.3)."""

    forward: int
    forward_back: int
    output_grad: int
    output_grad_back: int


# A device stores about (2 forward_back + 2 output_grad) p / 6 stages' activations.
ZB = Steps(4, 2, 4, 2)
HALF = Steps(2, 1, 2, 1)
MIN = Steps(1, 1, 1, 1)


@dataclass(frozen=True)
class Block:
    """Holds ticks of (F, F back, dO, dO back) on each device; repeated, it stores ``limit`` activations."""

    ticks: tuple[tuple[int, int, int, int], ...]
    period: int
    limit: int


@lru_cache
def block(steps: Steps, devices: int, period: int = FULL_PERIOD) -> Block:
    """Return the block with these steps whose waits at the turns store least, then take least time."""
    blocks = []
    for gaps in itertools.product(range(_GAPS), repeat=3):
        if sum(gaps) > _GAPS:
            continue
        ticks = _ticks(steps, devices, gaps)
        if all(len({tick % period for tick in device}) == len(device) for device in ticks):
            peak = max(_peak(device, period) for device in ticks)
            blocks.append((peak, sum(gaps), gaps, Block(ticks, period, peak)))
    return min(blocks, key=lambda row: row[:3])[-1]


def sequential(devices: int) -> Block:
    """Return the block that runs one micro-batch after the other: the fewest activations."""
    return Block(_ticks(MIN, devices, (0, 0, 0)), 4 * devices + 2, 2)


def _ticks(steps: Steps, devices: int, gaps: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    last = devices - 1
    back = steps.forward * last + 1 + gaps[0]
    down = back + steps.forward_back * last + 1 + gaps[1]
    home = down + steps.output_grad * last + 1 + gaps[2]
    return tuple(
        (
            steps.forward * device,
            back + steps.forward_back * (last - device),
            down + steps.output_grad * device,
            home + steps.output_grad_back * (last - device),
        )
        for device in range(devices)
    )


def _peak(ticks: tuple[int, ...], period: int) -> int:
    """Return the activations, from F to dW, that the repeated block stores on one device."""
    repeats = ticks[-1] // period + 3
    changes = [(tick + period * m, 1) for tick in ticks[:2] for m in range(repeats)]
    changes += [(tick + 1, -1) for tick, _, _ in _weight_grads(ticks, period, repeats)]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def _weight_grads(ticks: tuple[int, ...], period: int, microbatches: int) -> list[tuple[int, int, int]]:
    """Return (tick, place of the dO in ``ticks``, micro-batch): each dW in a free tick after its dO."""
    taken = {tick + period * m for tick in ticks for m in range(microbatches)}
    done = sorted((ticks[place] + period * m, place, m) for place in (2, 3) for m in range(microbatches))
    slots, free = [], 0
    for tick, place, microbatch in done:
        free = max(free, tick + 1)
        while free in taken:
            free += 1
        slots.append((free, place, microbatch))
        free += 1
    return slots


def lanes(of: Block, microbatches: int) -> list[list[Task]]:
    """Return the order of tasks on each device."""
    devices = len(of.ticks)
    orders = []
    for device, ticks in enumerate(of.ticks):
        there, back = device, 2 * devices - 1 - device
        kinds = (("F", there), ("F", back), ("dO", back), ("dO", there))
        timed = [
            (tick + of.period * m, Task(kind, stage, m))
            for tick, (kind, stage) in zip(ticks, kinds, strict=True)
            for m in range(microbatches)
        ]
        for tick, place, m in _weight_grads(ticks, of.period, microbatches):
            timed.append((tick, Task("dW", kinds[place][1], m)))
        orders.append([task for _, task in sorted(timed, key=lambda row: row[0])])
    return orders


# Takes the waiting out of a given order: tasks move forward into gaps while memory allows. Orders of V-shaped
# schedules are for tasks of one tick. Simulated with real costs, a device that would wait takes a later task
# that is ready (arXiv 2405.15362, section 3.4, "squeezing" and "reordering"). It ends: a task moves forward
# only if the rest of the order stores at most ``limit`` activations everywhere; the first task left of the
# given order heads its device's list, and what it needs is done.

_STORES = {"F": 1, "dO": 0, "dW": -1}
_CLASSES = 5


@dataclass(frozen=True)
class Style:
    """Says how a device chooses its next task.

    ``yielding``: a dW lets a ready F or dO pass.  ``fill``: what a gap is filled with first, dW or F (with
    dO). ``patience``: a task fills a gap only if, this many times as long, it ends before the next F or dO is
    ready.
    """

    yielding: bool = True
    fill: str = "dW"
    patience: float = 1.0


@dataclass(frozen=True)
class _Choice:
    place: int
    task: int
    is_weight_grad: bool
    allowed: bool


def squeezed(
    policy: str, stages: StagedLayers, lanes: list[list[Task]], limit: int, style: Style
) -> Schedule:
    """Order each device's tasks anew; ``limit``: most activations on it, counting 1 for each stage."""
    tasks, place = StepTasks(stages), stages.devices.tolist()
    times = tasks.run(place, tasks.urgent, choose=_Squeezing(tasks, lanes, limit, style))
    return stages.with_updates(policy, tasks.orders(place, times), back=True)


class _Squeezing:
    def __init__(self, tasks: StepTasks, lanes: list[list[Task]], limit: int, style: Style) -> None:
        self.tasks, self.limit, self.style = tasks, limit, style
        self.seconds = tasks.tasks.seconds
        number = {kind: tasks.numbers[place].tolist() for place, kind in enumerate(KINDS)}
        numbers = ([number[task.kind][task.stage][task.microbatch] for task in lane] for lane in lanes)
        self.left: list[list[int]] = list(numbers)
        self.stored = [0] * len(lanes)
        self.ready_s = [math.inf] * len(tasks.stage)

    def known(self, task: int, ready_s: float) -> None:
        self.ready_s[task] = ready_s

    def take(self, lane: int, now: float) -> int:
        left, place = self.left[lane], 0
        if not left:
            return -1
        if self.tasks.kind_of(left[0]) == "dW" or self.ready_s[left[0]] > now:
            choice = self._choose(self._choices(lane), now)
            if choice is None:
                return -1
            place = choice.place
        task = left.pop(place)
        self.stored[lane] += _STORES[self.tasks.kind_of(task)]
        return task

    def _choices(self, lane: int) -> list[_Choice]:
        """Return the first task left of each stage's F and dO, and the first dW."""
        choices: dict[tuple[str, int], _Choice] = {}
        stored = highest = self.stored[lane]
        for place, task in enumerate(self.left[lane]):
            kind = self.tasks.kind_of(task)
            key = (kind, -1 if kind == "dW" else self.tasks.stage[task])
            adds = _STORES[kind]
            if key not in choices:
                choices[key] = _Choice(place, task, kind == "dW", adds <= 0 or highest + adds <= self.limit)
                if len(choices) == _CLASSES:
                    break
            stored += adds
            highest = max(highest, stored)
        return list(choices.values())

    def _choose(self, choices: list[_Choice], now: float) -> _Choice | None:
        ready = [c for c in choices if c.allowed and self.ready_s[c.task] <= now]
        chain = [c for c in choices if not c.is_weight_grad]
        head = choices[0]
        yields = self.style.yielding and head.is_weight_grad
        if head in ready and not yields:
            return head
        if chain and chain[0] in ready and (self.style.yielding or chain[0] is head):
            return chain[0]
        later_s = (self.ready_s[c.task] for c in chain)
        soon_s = min((ready_s for ready_s in later_s if ready_s > now), default=math.inf)
        ends_s = {c.place: now + self.style.patience * self.seconds[c.task] for c in ready}
        fitting = [c for c in ready if c is head or ends_s[c.place] <= soon_s * (1 + 1e-12)]
        wanted = [c for c in fitting if c.is_weight_grad == (self.style.fill == "dW")]
        return next(iter(wanted or fitting), None)


# From the most memory to the least.
_FAMILY = (ZB, HALF, MIN)
STYLES = (Style(), Style(patience=0.0), Style(fill="F"), Style(yielding=False))
# Beyond this many tasks styles are compared for fewer micro-batches.
_TASKS_TO_COMPARE = 4_000


def make(policy: str, steps: Steps, problem: Problem) -> Schedule:
    """Make a block's schedule; above the memory limit try leaner blocks, longer periods, then sequential."""
    stages = v_stages(problem)
    for leaner in _blocks(steps, problem.devices) if problem.memory_limit_bytes != 0 else ():
        # Squeezed orders store as many micro-batches as the block's own.
        if within_limit(problem, stages.with_updates(policy, lanes(leaner, problem.microbatches), back=True)):
            over, schedule = _fastest(policy, stages, leaner)
            if not over:
                return schedule
    return _fastest(policy, stages, sequential(problem.devices))[1]


def _blocks(steps: Steps, devices: int) -> Iterator[Block]:
    for leaner in _FAMILY[_FAMILY.index(steps) :]:
        yield block(leaner, devices)
    period, longest = FULL_PERIOD + 2, sequential(devices).period
    while period < longest:
        yield block(MIN, devices, period)
        period += 2 * (period // 8)  # even: in odd ones, ticks of the way there and back meet


def _fastest(policy: str, stages: StagedLayers, of: Block) -> tuple[bool, Schedule]:
    """Return the best of the block's own order and each style's; (True, ...) if it is above the limit."""
    order = lanes(of, stages.problem.microbatches)
    schedules = [squeezed(policy, stages, order, of.limit, style) for style in _styles(policy, stages, of)]
    schedules.append(stages.with_updates(policy, order, back=True))
    rows = [(rank(stages.problem, on_paper(stages.problem, each)), each) for each in schedules]
    (over, _), schedule = min(rows, key=lambda row: row[0])
    return over, schedule


def _styles(policy: str, stages: StagedLayers, of: Block) -> tuple[Style, ...]:
    """Return all styles; with many tasks only the one that is best for a few micro-batches."""
    count, few = stages.problem.microbatches, dataclasses.replace(stages, problem=stages.problem.shortened)
    if 3 * len(stages.bounds) * count <= _TASKS_TO_COMPARE or count == few.problem.microbatches:
        return STYLES
    order = lanes(of, few.problem.microbatches)

    def seconds(style: Style) -> tuple[bool, float]:
        schedule = squeezed(policy, few, order, of.limit, style)
        return rank(few.problem, on_paper(few.problem, schedule))

    return (min(STYLES, key=seconds),)


def v_stages(problem: Problem) -> StagedLayers:
    """Return two stages on each device, the second on the way back. OptionsError: :meth:`StagedLayers.of`."""
    return StagedLayers.of(problem, 2, v_places(problem.devices))


def v_places(devices: int) -> tuple[int, ...]:
    """Return the device of each stage of a V."""
    return (*range(devices), *reversed(range(devices)))
