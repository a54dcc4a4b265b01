"""The best order on one link: jobs with release times and tails (Carlier, EJOR 11, 1982).

Taking what is ready, longest tail first, is optimal if jobs can be interrupted.  They cannot: branch and
bound over which job of a critical block goes before or after all others of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _LinkRun:
    order: list[int]
    end_s: list[float]
    total_s: float


def best_order(
    release_s: Sequence[float],
    seconds: Sequence[float],
    tail_s: Sequence[float],
    floor_s: float = 0.0,
    limit: int = 100,
) -> list[int]:
    """The order with the smallest largest ``end + tail`` of all that ``limit`` branches show."""
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


def _longest_tail_first(
    release_s: Sequence[float], seconds: Sequence[float], tail_s: Sequence[float]
) -> _LinkRun:
    urgency = sorted(range(len(seconds)), key=lambda job: -tail_s[job])
    end_s, order = serve(release_s, seconds, urgency)
    return _LinkRun(order, end_s, max((end_s[job] + tail_s[job] for job in order), default=0.0))


def serve(
    ready_s: Sequence[float], seconds: Sequence[float], urgency: Sequence[int]
) -> tuple[list[float], list[int]]:
    """Return one machine that takes what is ready, the first of ``urgency`` first: ends, and the order."""
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


def critical_block(
    run_order: Sequence[int], end_s: Sequence[float], seconds: Sequence[float], tail_s: Sequence[float]
) -> tuple[int, int]:
    """Places in the order of the first and last job of the block that decides: no idle time in between."""
    last = max(range(len(run_order)), key=lambda at: (end_s[run_order[at]] + tail_s[run_order[at]], at))
    first = last
    while first and end_s[run_order[first - 1]] >= end_s[run_order[first]] - seconds[run_order[first]]:
        first -= 1
    return first, last


def _branches(
    run: _LinkRun,
    release: list[float],
    seconds: Sequence[float],
    tail: list[float],
    floor_s: float,
    best_s: float,
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
