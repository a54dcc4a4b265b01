"""Chooses the layers that run their forward again before their dO: as few seconds as keep a memory limit.

A layer's bytes are worth most where they cost few seconds and where many micro-batches are stored.  Whether
some layers are enough, and what that costs, is simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from tf_ooo.errors import MemoryLimitError
from tf_ooo.planning.building.merging import merged
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.recomputation import saved_bytes, with_recomputed
from tf_ooo.planning.model.schedule import Schedule

if TYPE_CHECKING:
    from tf_ooo.planning.choosing.plan import Trial

NONE, AUTO, ALL = "none", "auto", "all"
CHOICES = (AUTO, NONE, ALL)
# Sets of layers that are tried, each with more of them; and layers that are left out again.
_ROUNDS, _LEFT_OUT = 12, 24
# Above so many only none and all are compared.
_TASKS_TO_SEARCH = 20_000
_STORES = {"F": 1, "dO": -1}

Make = Callable[[Problem], "Trial"]


def recomputed(problem: Problem, chosen: Collection[int]) -> Problem:
    """Return the same problem with these layers computed again."""
    numbers = tuple(sorted(chosen))
    layers = with_recomputed(problem.own_layers, numbers)
    if problem.model:
        layers = merged(layers, problem.bounds, problem.microbatches)
    return dataclasses.replace(
        problem, layers=layers, recompute=NONE, recomputed=numbers, plain=problem.layers
    )


def worth_it(problem: Problem) -> list[int]:
    """The layers that keep less if they are computed again, the fewest seconds for their bytes first."""
    layers = problem.own_layers
    saved = {number: saved_bytes(layers, number) for number in range(len(layers))}
    numbers = [number for number, size in saved.items() if size > 0 and number not in problem.fixed]
    return sorted(numbers, key=lambda number: (layers[number].forward_s / saved[number], number))


def search(problem: Problem, within: Make, free: Make) -> Trial:
    """The fastest trial within the limit; without a limit, or where nothing is above it, nothing runs again.

    Args:
        problem: with ``recompute`` all or auto.
        within: a policy's trial within the limit; raises MemoryLimitError where there is none.
        free: its trial, as if there were no limit.
    """
    if problem.recompute == ALL:
        return within(recomputed(problem, worth_it(problem)))
    plain = dataclasses.replace(problem, recompute=NONE)
    if problem.memory_limit_bytes is None or free(plain).keeps_limit:
        return within(plain)
    trials: list[Trial] = []
    errors: list[MemoryLimitError] = []
    for chosen in ((), *_growing(plain, free)):
        try:
            trials.append(within(recomputed(plain, chosen) if chosen else plain))
        except MemoryLimitError as error:
            errors.append(error)
    if not trials:
        raise min(errors, key=lambda error: error.smallest_bytes or 0)
    return _fewer(plain, min(trials, key=_cost), within)


def _cost(trial: Trial) -> tuple[float, int]:
    """The rounding of sums must not decide."""
    return float(f"{trial.step_s:.9g}"), len(trial.problem.recomputed)


def _growing(problem: Problem, free: Make) -> Iterator[tuple[int, ...]]:
    """Sets of layers, each with more of them where too much is stored; the last are all that save bytes."""
    order, chosen = worth_it(problem), set[int]()
    for _ in range(_ROUNDS if len(free(problem).schedule.tasks) <= _TASKS_TO_SEARCH else 0):
        trial = free(recomputed(problem, chosen))
        added = _enough(problem, trial, [number for number in order if number not in chosen])
        if not added:
            break
        chosen |= added
        yield tuple(sorted(chosen))
    if len(chosen) < len(order):
        yield tuple(sorted(order))


def _enough(problem: Problem, trial: Trial, left: list[int]) -> set[int]:
    """Take layers left, in their order, so many on each device above its limit as may be enough."""
    schedule, limit = trial.schedule, problem.memory_limit_bytes or 0
    stored, device_of = _stored(schedule)
    layers_of = _bounds(problem) if problem.model else schedule.layers_of
    stage_of = {layer: stage for stage in device_of for layer in layers_of(stage)}
    charged = problem.charged_bytes(trial.timeline.peak_bytes)
    excess = {device: float(size - limit) for device, size in enumerate(charged)}
    added: set[int] = set()
    for number in left:
        stage = stage_of.get(number, -1)
        device = device_of.get(stage, -1)
        if excess.get(device, 0) > 0:
            # The micro-batch whose dO runs has all of it there.
            excess[device] -= saved_bytes(problem.own_layers, number) * max(stored[stage] - 1, 1)
            added.add(number)
    return added


def _bounds(problem: Problem) -> Callable[[int], range]:
    """Return the layers of each stage that ``layers`` stand for."""
    return lambda stage: range(problem.bounds[stage][0], problem.bounds[stage][1] + 1)


def _stored(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """The most micro-batches between F and dO of each stage, in its lane's order, and the device of its F."""
    most: dict[int, int] = {}
    device_of: dict[int, int] = {}
    for (device, _), tasks in schedule.lanes.items():
        now: dict[int, int] = {}
        for task in tasks:
            if task.kind in _STORES:
                now[task.stage] = now.get(task.stage, 0) + _STORES[task.kind]
                most[task.stage] = max(most.get(task.stage, 0), now[task.stage])
            if task.kind == "F":
                device_of[task.stage] = device
    return most, device_of


def _fewer(problem: Problem, best: Trial, within: Make) -> Trial:
    """Leave out layers that the limit does not need, those of most seconds first."""
    costly = sorted(best.problem.recomputed, key=lambda number: -problem.own_layers[number].forward_s)
    for number in costly[:_LEFT_OUT] if len(best.schedule.tasks) <= _TASKS_TO_SEARCH else ():
        chosen = set(best.problem.recomputed) - {number}
        try:
            trial = within(recomputed(problem, chosen) if chosen else problem)
        except MemoryLimitError:
            continue
        best = min(best, trial, key=_cost)
    return best
