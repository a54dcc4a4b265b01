"""Defines ``search``: the order of computation and of communication optimised together, by simulation.

Large gradients are sliced where that is predicted to help: an urgent small one never waits behind a whole
large one (ByteScheduler, P3), but every slice pays the link's latency.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import random
from collections.abc import Iterator
from typing import Any

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building import joint
from tf_ooo.planning.building.choice import first_or_leanest, on_paper, within_limit
from tf_ooo.planning.building.regions import MainStream, Regions, own, schedule
from tf_ooo.planning.building.search_order import Effort, OrderSearch, Solution, starts
from tf_ooo.planning.building.step_model import Shares, StepModel
from tf_ooo.planning.building.walk import walk
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.policies.policy import BY_COSTS, Policy

NAME = "search"
_EVALUATIONS, _LEAST_EVALUATIONS, _LAYER_EVALUATIONS = 4000, 400, 60_000
_STREAM_EVALUATIONS, _STREAM_LAYERS, _MOVED_AT_ONCE = 150, 3000, 4
_MOST_SLICES = 64
_COMPARED = 5
# Slicing is not taken for less: real slices cost something that the link's latency does not tell.
_WORTH = 1 - 1e-3


def make(problem: Problem) -> Schedule:
    """Return the fastest schedule found.

    Options: ``evaluations``, how many schedules are tried (the same number always gives the same
    schedule); ``budget_s``, seconds after which it ends earlier; ``seed``; ``progress(done, of,
    best_s)``, a function that reports progress; ``communication``, ``"priority"`` or ``"ordered"`` if the
    runtime can do only one; ``slice_bytes``, the size of slices (0: never slice).
    """
    # So many evaluations take a few seconds: one takes longer with more layers.
    several = max(_LEAST_EVALUATIONS, min(_EVALUATIONS, _LAYER_EVALUATIONS // len(problem.layers)))
    alone = max(20, min(_STREAM_EVALUATIONS, _STREAM_LAYERS // len(problem.layers)))
    count = problem.option("evaluations", alone if problem.devices == 1 else several, 1)
    effort = Effort(count, _seconds(problem), problem.options.get("progress"))
    seed = problem.option("seed", 0)
    if problem.devices == 1:
        return _one_device(problem, effort, random.Random(seed))
    way = problem.options.get("communication")
    if way not in (None, "priority", "ordered"):
        raise OptionsError(f"communication must be 'priority' or 'ordered', got {way!r}")
    return _data_parallel(problem, effort, seed, way)


def _seconds(problem: Problem) -> float | None:
    value: Any = problem.options.get("budget_s")
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
        raise OptionsError(f"budget_s must be a number that is not negative, got {value!r}")
    return value


def _one_device(problem: Problem, effort: Effort, draw: random.Random) -> Schedule:
    """Move a few dW at a time to other regions; keep orders that are faster and fit into memory."""
    joint.check(problem, NAME)
    first = joint.best_placement(problem)
    if len(problem.layers) == 1:
        return schedule(NAME, problem, first)

    def changed(here: tuple[float, Regions]) -> tuple[float, Regions] | None:
        effort.spend(here[0])
        placement = _changed(here[1], draw)
        step_s = joint.step_s(problem, placement)
        if step_s >= here[0] * (1 - 1e-9) or not within_limit(problem, schedule(NAME, problem, placement)):
            return None
        return step_s, placement

    bound_s = sum(layer.forward_s + layer.output_grad_s for layer in problem.layers)
    start = joint.step_s(problem, first), first
    _, best = walk(start, changed, operator.itemgetter(0), effort.turns(), bound_s=bound_s)
    return schedule(NAME, problem, best)


def _changed(placement: Regions, draw: random.Random) -> Regions:
    stream = MainStream(len(placement))
    changed = dict(placement)
    for _ in range(draw.randint(1, min(_MOVED_AT_ONCE, len(placement) - 1))):
        layer = draw.randrange(1, len(placement))
        anywhere = stream.regions[draw.choice(stream.allowed(layer))]
        changed[layer] = draw.choice((None, own(layer), anywhere, _beside(placement, layer, stream, draw)))
    return changed


def _beside(placement: Regions, layer: int, stream: MainStream, draw: random.Random) -> Task:
    region, allowed = placement[layer] or own(layer), stream.allowed(layer)
    place = (allowed.start if region is None else stream.place(region)) + draw.choice((-2, -1, 1, 2))
    return stream.regions[min(max(place, allowed.start), allowed.stop - 1)]


def _data_parallel(problem: Problem, effort: Effort, seed: int, way: str | None) -> Schedule:
    slicings = list(_slicings(problem))
    whole = OrderSearch(NAME, StepModel(problem, slicings[0]), effort, seed, way != "priority")
    begin = starts(problem)
    best, by = whole.run(begin), whole
    if best is None:
        return first_or_leanest(problem, (whole.schedule(whole.look(start)) for start in begin))
    for shares in slicings[1:]:
        if best.period_s <= whole.floor_s:
            break
        sliced = OrderSearch(NAME, StepModel(problem, shares), effort.share(8), seed, way != "priority")
        solution = sliced.run([best.backward, *begin])
        if solution is not None and solution.period_s < best.period_s * _WORTH:
            best, by = solution, sliced
    schedules = [by.schedule(_in_the_wanted_way(best, way))]
    if any(layer.occupancy for layer in problem.layers):
        # The simulator lets updates slow computation down, the model of the search does not.
        looks = (whole.look(start) for start in begin[:_COMPARED])
        schedules += [whole.schedule(_in_the_wanted_way(look, way)) for look in looks]
    fastest = sorted(schedules, key=lambda each: on_paper(problem, each).steady_step_s)
    return first_or_leanest(problem, fastest)


def _in_the_wanted_way(solution: Solution, way: str | None) -> Solution:
    return dataclasses.replace(solution, order=solution.step.sent) if way == "ordered" else solution


def _slicings(problem: Problem) -> Iterator[Shares]:
    """Yield slicings to try: none, then smaller and smaller slices; or only the size asked for."""
    largest = max(layer.weight_bytes for layer in problem.layers)
    if "slice_bytes" in problem.options:
        size = problem.option("slice_bytes", 0)
        yield slices(problem, size) if size else {}
        return
    yield {}
    for halvings in range(1, 7) if largest else ():
        yield slices(problem, largest / 2**halvings)


def slices(problem: Problem, slice_bytes: float) -> Shares:
    """Return equal shares of each gradient larger than a slice, at most 64 for one gradient."""
    counts = (math.ceil(layer.weight_bytes / slice_bytes - 1e-9) for layer in problem.layers)
    several = {layer: min(count, _MOST_SLICES) for layer, count in enumerate(counts) if count > 1}
    return {layer: (1 / count,) * count for layer, count in several.items()}


POLICY = Policy(
    NAME,
    ("single_device", "data_parallel"),
    make,
    ("budget_s", "evaluations", "seed", "progress", "communication", "slice_bytes", "gains", "capture"),
    of_programs=("progress", "gains", "capture"),
    needs=BY_COSTS,
    costs_only=("single_device",),
)
