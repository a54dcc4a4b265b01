"""Optimises the order of dW and the order of communications together, for data parallel.

For an order of dW :func:`best_order` looks for the best order on the link; dW are moved from several starts.
Moves that can help follow from the critical path: computation up to one dW, a block of communications without
a gap, the forward that waited for the block.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tf_ooo.planning.building.choice import within_limit
from tf_ooo.planning.building.step_model import StepModel, TimedStep, by_period, order
from tf_ooo.planning.building.walk import walk
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule

Seconds = Sequence[float]


# The best order on one link: jobs with release times and tails (Carlier, EJOR 11, 1982). Taking the ready job
# of longest tail first is optimal if jobs can be interrupted. They cannot: branch and bound over which job of
# a critical block goes before or after all others of it.


@dataclass(frozen=True)
class _LinkRun:
    order: list[int]
    end_s: list[float]
    total_s: float


def best_order(
    release_s: Seconds, seconds: Seconds, tail_s: Seconds, floor_s: float = 0.0, limit: int = 100
) -> list[int]:
    """Return the order with the smallest largest ``end + tail``, among those that ``limit`` branches show."""
    best = _longest_tail_first(release_s, seconds, tail_s)
    stack = [(list(release_s), list(tail_s))]
    while stack and limit and best.total_s > floor_s:
        limit -= 1
        release, tail = stack.pop()
        run = _longest_tail_first(release, seconds, tail)
        true_s = max(run.end_s[job] + tail_s[job] for job in run.order)
        if true_s < best.total_s:
            best = _LinkRun(run.order, run.end_s, true_s)
        stack += _branches(run, release, seconds, tail, max(floor_s, 0.0), best.total_s)
    return best.order


def _longest_tail_first(release_s: Seconds, seconds: Seconds, tail_s: Seconds) -> _LinkRun:
    urgency = sorted(range(len(seconds)), key=lambda job: -tail_s[job])
    end_s, order = serve(release_s, seconds, urgency)
    return _LinkRun(order, end_s, max((end_s[job] + tail_s[job] for job in order), default=0.0))


def serve(ready_s: Seconds, seconds: Seconds, urgency: Sequence[int]) -> tuple[list[float], list[int]]:
    """Run one machine that takes ready jobs, the first of ``urgency`` first: return ends and order."""
    arrivals = sorted(range(len(ready_s)), key=ready_s.__getitem__)
    rank = [0] * len(arrivals)
    for place, job in enumerate(urgency):
        rank[job] = place
    end_s, order = [0.0] * len(arrivals), []
    waiting: list[int] = []
    now_s, at, count = 0.0, 0, len(arrivals)
    while at < count or waiting:
        if not waiting:
            now_s = max(now_s, ready_s[arrivals[at]])
        while at < count and ready_s[arrivals[at]] <= now_s:
            heapq.heappush(waiting, rank[arrivals[at]])
            at += 1
        job = urgency[heapq.heappop(waiting)]
        now_s += seconds[job]
        end_s[job] = now_s
        order.append(job)
    return end_s, order


def critical_block(jobs: list[int], end_s: Seconds, seconds: Seconds, tail_s: Seconds) -> tuple[int, int]:
    """Return the first and last place of the block without idle time that decides the makespan."""
    first = last = max(range(len(jobs)), key=lambda at: (end_s[jobs[at]] + tail_s[jobs[at]], at))
    while first and end_s[jobs[first - 1]] >= end_s[jobs[first]] - seconds[jobs[first]]:
        first -= 1
    return first, last


def _branches(
    run: _LinkRun, release: list[float], seconds: Seconds, tail: list[float], floor_s: float, best_s: float
) -> list[tuple[list[float], list[float]]]:
    first, last = critical_block(run.order, run.end_s, seconds, tail)
    urgent_s = tail[run.order[last]]
    lazy = next((at for at in range(last - 1, first - 1, -1) if tail[run.order[at]] < urgent_s), None)
    if lazy is None:
        return []
    job, block = run.order[lazy], run.order[lazy + 1 : last + 1]
    ready_s, length_s = min(release[j] for j in block), sum(seconds[j] for j in block)
    if max(ready_s + length_s + urgent_s, floor_s) >= best_s:
        return []
    before, after = list(tail), list(release)
    before[job] = max(before[job], length_s + urgent_s)
    after[job] = max(after[job], ready_s + length_s)
    return [(release, before), (after, tail)]


Progress = Callable[[int, int, float], None]

_STARTS, _FIRST_K_STARTS = 6, 12
_SMALL = 14
_CLOSE, _CLOSE_OF_MANY = 1.1, 1.01
_LINK_WORK = 600
_GAP = 1 + 2e-4
_MOVES_OF_A_BLOCK = 12
# Random moves may make a step slower by this share.
_SLOWER = 0.01


@dataclass(frozen=True)
class Solution:
    """Holds an order of one step; communications by number, None: the most urgent that is ready."""

    backward: list[int]
    order: list[int] | None
    step: TimedStep

    @property
    def period_s(self) -> float:
        return self.step.period_s


_period_s = operator.attrgetter("period_s")


@dataclass
class Effort:
    """Says how long to search: a number of evaluations, and optionally seconds that end it earlier."""

    evaluations: int
    budget_s: float | None = None
    progress: Progress | None = None
    done: int = 0

    def __post_init__(self) -> None:
        self._until_s = None if self.budget_s is None else time.monotonic() + self.budget_s

    def share(self, parts: int) -> Effort:
        """Return an effort of this fraction of the evaluations, and of the seconds that are left."""
        left_s = None if self._until_s is None else max(0.0, self._until_s - time.monotonic()) / 2
        return Effort(self.evaluations // parts, left_s, self.progress)

    def spend(self, best_s: float) -> None:
        self.done += 1
        if self.progress is not None and self.done % 50 == 0:
            self.progress(min(self.done, self.evaluations), self.evaluations, best_s)

    def turns(self) -> Iterator[float]:
        """Yield 1 for each turn until the effort is over."""
        return itertools.takewhile(lambda _: not self.over, itertools.repeat(1.0))

    @property
    def over(self) -> bool:
        """Return whether to stop; the best schedule so far is valid."""
        late = self._until_s is not None and time.monotonic() >= self._until_s
        return late or self.done >= self.evaluations


class OrderSearch:
    """Looks for the fastest order with one way of slicing; the same ``seed`` finds the same."""

    def __init__(self, policy: str, model: StepModel, effort: Effort, seed: int, may_order: bool) -> None:
        self.policy, self.model, self.effort, self.may_order = policy, model, effort, may_order
        self.random = random.Random(seed)
        ahead_s = [sum(model.forward_s[layer:]) for layer in range(model.layers)]
        stages = [task.stage for task in model.comms]
        self.tail_s = [model.update_s[stage] + ahead_s[stage] for stage in stages]
        self.floor_s = model.lower_bound_s * (_GAP if model.layers > _SMALL else 1 + 1e-12)
        self.close = _CLOSE_OF_MANY if model.layers > _SMALL else _CLOSE
        self.branches = max(4, _LINK_WORK // max(1, len(model.comms)))
        self._looked: dict[tuple[int, ...], Solution] = {}
        self._fits: dict[tuple[int, ...], bool] = {}

    def run(self, starts: list[list[int]]) -> Solution | None:
        """Return the best result from several orders of dW; None where none of them fits into memory."""
        solutions = [self.look(start) for start in starts]
        fitting = sorted((each for each in solutions if self.fits(each)), key=_period_s)
        if not fitting:
            return None
        best = fitting[0]
        for start in fitting[:_STARTS]:
            best = min(best, self._descend(start, best.period_s), key=_period_s)
            if self._enough(best):
                return best
        turns = self.effort.turns()
        return walk(best, self._shaken, _period_s, turns, bound_s=self.floor_s, tolerance=_SLOWER)

    def fits(self, solution: Solution) -> bool:
        """Return whether a solution keeps the memory limit, by simulation."""
        if self.model.problem.memory_limit_bytes is None:
            return True
        key = (*solution.backward, -(10**9), *(solution.order or ()))
        if key not in self._fits:
            self._fits[key] = within_limit(self.model.problem, self.schedule(solution))
        return self._fits[key]

    def schedule(self, solution: Solution) -> Schedule:
        return self.model.schedule(self.policy, solution.backward, solution.order)

    def _enough(self, solution: Solution) -> bool:
        return solution.period_s <= self.floor_s or self.effort.over

    def look(self, backward: list[int], best_s: float = float("inf")) -> Solution:
        """Return the step with this order of dW, with a more careful order on the link if promising."""
        self.effort.spend(best_s)
        key = tuple(backward)
        if key not in self._looked:
            self._looked[key] = self._timed(backward, best_s)
        return self._looked[key]

    def _timed(self, backward: list[int], best_s: float) -> Solution:
        by_priority = Solution(backward, None, self.model.run(backward))
        if not self.may_order or not self.floor_s < by_priority.period_s < self.close * best_s:
            return by_priority
        release_s = by_priority.step.weight_grad_end_s
        order = best_order(release_s, self.model.comm_s, self.tail_s, self.floor_s, self.branches)
        careful = Solution(backward, order, self.model.run(backward, order))
        return careful if careful.period_s < by_priority.period_s * (1 - 1e-9) else by_priority

    def _descend(self, here: Solution, best_s: float) -> Solution:
        """Take the first move that helps until none does."""
        while not self._enough(here):
            for backward in self._moves(here):
                there = self.look(backward, min(best_s, here.period_s))
                if there.period_s < here.period_s * (1 - 1e-9) and self.fits(there):
                    here = there
                    break
                if self.effort.over:
                    return here
            else:
                return here
        return here

    def _shaken(self, here: Solution) -> Solution | None:
        """Make random moves, then descend again."""
        backward, dw = here.backward, [task for task in here.backward if task >= 0]
        for _ in range(self.random.randint(1, 3)):
            layer = self.random.choice(dw)
            backward = _moved(backward, layer, self.random.randint(0, len(backward) - 1))
        there = self.look(backward, here.period_s)
        return self._descend(there, here.period_s) if self.fits(there) else None

    def _moves(self, solution: Solution) -> Iterator[list[int]]:
        """Yield neighbours that may be faster; with few layers every order with one dW moved."""
        seen = {tuple(solution.backward)}
        moves = self._critical(solution)
        if self.model.layers <= _SMALL:
            places = itertools.product(range(self.model.layers), range(len(solution.backward)))
            moves = (_moved(solution.backward, layer, place) for layer, place in places)
        for backward in moves:
            if tuple(backward) not in seen:
                seen.add(tuple(backward))
                yield backward

    def _critical(self, solution: Solution) -> Iterator[list[int]]:
        step, backward = solution.step, solution.backward
        first, last = critical_block(step.sent, step.comm_end_s, self.model.comm_s, self.tail_s)
        stages = list(dict.fromkeys(self.model.comms[job].stage for job in step.sent[first : last + 1]))
        opens, waits = stages[0], stages[-1]
        at = backward.index(opens)
        # The block begins with a dW: it earlier, or what stands before it later.
        yield _moved(backward, opens, 0)
        yield _moved(backward, opens, (backward.index(-1 - opens) + at) // 2)
        for task in [t for t in backward[:at] if t >= 0][-_MOVES_OF_A_BLOCK:]:
            yield _moved(backward, task, at)
            yield _moved(backward, task, len(backward) - 1)
        # Tasks that the forward waits for come earlier, less urgent ones later.
        yield _moved(backward, waits, 0)
        for stage in stages[:_MOVES_OF_A_BLOCK]:
            yield _moved(backward, waits, backward.index(stage))
            if stage > waits:
                yield _moved(backward, stage, backward.index(waits))
                yield _moved(backward, stage, len(backward) - 1)


def _moved(backward: list[int], layer: int, place: int) -> list[int]:
    """Return the order with one dW at another place, but not before the dO that it needs."""
    rest = [task for task in backward if task != layer]
    place = max(place, rest.index(-1 - layer) + 1)
    return [*rest[:place], layer, *rest[place:]]


def starts(problem: Problem) -> list[list[int]]:
    """Return orders to begin with: stock, all dO first, reverse first-k of several k."""
    layers = len(problem.layers)
    chosen = [0, layers, *by_period(problem)[:_FIRST_K_STARTS], layers // 4, layers // 2]
    return [order(layers, k) for k in dict.fromkeys(chosen)]
