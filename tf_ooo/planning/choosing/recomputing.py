"""Chooses the layers that run their forward again before their dO, in the fewest seconds, to save memory.

A layer is worth most where its bytes cost few seconds and many micro-batches are stored. Simulation tells
whether some layers are enough, and what that costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from tf_ooo.errors import MemoryLimitError, OptionsError
from tf_ooo.planning.building.stages import merged, one_each, stage_of_layer
from tf_ooo.planning.model.problem import Problem, saved_bytes, with_recomputed
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.units import seconds_text

if TYPE_CHECKING:
    from tf_ooo.planning.choosing.plan import Trial

NONE, AUTO, ALL = "none", "auto", "all"
CHOICES = (AUTO, NONE, ALL)
# How many sets of layers are tried, each with more of them; how many layers are left out again, and how many
# of these with another order.
_ROUNDS, _LEFT_OUT, _PLANNED_AGAIN = 12, 24, 12
# Leaving layers out again made no step faster by as much.
_CLOSE = 1.1
# Now and then a policy's schedule is faster within the limit than without, by less than this.
_BEHIND = 1.1
# Above so many only none and all are compared.
_TASKS_TO_SEARCH = 20_000
_STORES = {"F": 1, "dO": -1}

Make = Callable[[Problem], "Trial"]


def recomputed(problem: Problem, chosen: Collection[int]) -> Problem:
    """Return the same problem with the chosen layers computed again."""
    if not chosen:
        return dataclasses.replace(problem, recompute=NONE)
    again = tuple(sorted(chosen))
    layers = with_recomputed(problem.own_layers, again)
    if problem.model:
        layers = merged(layers, problem.bounds, problem.microbatches)
    return dataclasses.replace(problem, layers=layers, recompute=NONE, recomputed=again, plain=problem.layers)


def worth_it(problem: Problem) -> list[int]:
    """Return the layers that keep less if they run again, the fewest seconds for their bytes first."""
    layers = problem.own_layers
    saved = {number: saved_bytes(layers, number) for number in range(len(layers))}
    numbers = [number for number, size in saved.items() if size > 0 and number not in problem.fixed]
    return sorted(numbers, key=lambda number: (layers[number].forward_s / saved[number], number))


def slower_text(free_s: float, to_beat_s: float) -> str:
    """Say why a schedule is not searched: without a limit it is already slower than another within it."""
    return (
        f"takes {seconds_text(free_s)} without the limit already, another {seconds_text(to_beat_s)} within it"
    )


def search(problem: Problem, within: Make, free: Make, to_beat_s: float) -> Trial:
    """Return the fastest trial within the limit; if nothing is above the limit, no layer runs again.

    A limit hardly makes a schedule faster: more layers run again only while the trial without the limit is
    not much slower than another policy's within it.

    Args:
        problem: with ``recompute`` all or auto.
        within: a policy's trial within the limit; raises MemoryLimitError where there is none.
        free: a policy's trial without the limit.
        to_beat_s: another policy's step within the limit.  OptionsError where everything here is slower.
    """
    if problem.recompute == ALL:
        return within(recomputed(problem, worth_it(problem)))
    plain = dataclasses.replace(problem, recompute=NONE)
    if problem.memory_limit_bytes is None:
        return within(plain)
    unlimited = free(plain)
    if plain.keeps_limit(unlimited.timeline.peak_bytes):
        return within(plain)
    trials: list[Trial] = []
    errors: list[MemoryLimitError] = []
    for again, trial in _growing(plain, unlimited, free):
        if trial.step_s > to_beat_s * _BEHIND:
            if trials:
                break
            slower = slower_text(trial.step_s, to_beat_s)
            raise OptionsError(f"with as many layers again as it needs, {slower}")
        kept = kept_within(trial, plain)
        try:
            trials.append(kept or within(again))
        except MemoryLimitError as error:
            errors.append(error)
        if kept:
            break
    if not trials:
        raise min(errors, key=lambda error: error.smallest_bytes or 0)
    best = min(trials, key=_cost)
    repeating = min((trial for trial in trials if trial.problem.recomputed), key=_cost, default=best)
    close = repeating.step_s < min(to_beat_s, best.step_s) * _CLOSE
    return min(best, _fewer(plain, repeating, within), key=_cost) if close else best


def kept_within(trial: Trial, problem: Problem) -> Trial | None:
    """Return a trial made without the limit as a trial within it, if it keeps the limit."""
    if not problem.keeps_limit(trial.timeline.peak_bytes):
        return None
    limited = dataclasses.replace(trial.problem, memory_limit_bytes=problem.memory_limit_bytes)
    return dataclasses.replace(trial, problem=limited)


def _cost(trial: Trial) -> tuple[float, int]:
    """Return the cost, rounded so that rounding errors of sums do not decide."""
    return float(f"{trial.step_s:.9g}"), len(trial.problem.recomputed)


def _growing(problem: Problem, trial: Trial, free: Make) -> Iterator[tuple[Problem, Trial]]:
    """Yield problems with more and more layers that run again, each with its trial without the limit.

    In the first none runs again, with ``trial``; in the last all do that save bytes.
    """
    order, chosen = worth_it(problem), set[int]()
    yield problem, trial
    for _ in range(_ROUNDS if len(trial.schedule.tasks) <= _TASKS_TO_SEARCH else 0):
        added = _enough(problem, trial, [number for number in order if number not in chosen])
        if not added:
            break
        chosen |= added
        again = recomputed(problem, chosen)
        trial = free(again)
        yield again, trial
    if len(chosen) < len(order):
        yield recomputed(problem, order), trial


def _enough(problem: Problem, trial: Trial, left: list[int]) -> set[int]:
    """Take layers left, in their order, as many on each device above its limit as may be enough."""
    schedule, limit = trial.schedule, problem.memory_limit_bytes or 0
    stored, device_of = _stored(schedule)
    bounds = trial.problem.bounds if problem.model else schedule.stages
    stage_of = stage_of_layer(bounds or one_each(problem.layers))
    charged = problem.charged_bytes(trial.timeline.peak_bytes)
    excess = {device: float(size - limit) for device, size in enumerate(charged)}
    added: set[int] = set()
    for number in left:
        stage = stage_of[number]
        device = device_of.get(stage, -1)
        if excess.get(device, 0) > 0:
            # The micro-batch whose dO runs has all of it there.
            excess[device] -= saved_bytes(problem.own_layers, number) * max(stored[stage] - 1, 1)
            added.add(number)
    return added


def _stored(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """Return by stage the most micro-batches between F and dO in its lane's order, and its F's device."""
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
    """Drop layers that the limit does not need, those of most seconds first.

    If the present order would be above the limit, another one was never faster.
    """
    costly = sorted(best.problem.recomputed, key=lambda number: -problem.own_layers[number].forward_s)
    again = 0
    for number in costly[:_LEFT_OUT] if len(best.schedule.tasks) <= _TASKS_TO_SEARCH else ():
        trial = _in_same_order(best, number)
        if not trial.keeps_limit:
            continue
        best, chosen = min(best, trial, key=_cost), set(best.problem.recomputed) - {number}
        again += 1
        if again > _PLANNED_AGAIN:
            continue
        try:
            trial = within(recomputed(problem, chosen))
        except MemoryLimitError:
            continue
        best = min(best, trial, key=_cost)
    return best


def _in_same_order(trial: Trial, number: int) -> Trial:
    """Return the same schedule with one layer fewer that runs again."""
    problem = trial.problem
    plain = dataclasses.replace(problem, layers=problem.plain, recomputed=(), plain=())
    return dataclasses.replace(trial, problem=recomputed(plain, set(problem.recomputed) - {number}))
