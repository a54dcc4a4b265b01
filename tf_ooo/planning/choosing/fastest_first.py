"""Tries policies within a memory limit, and ends the search of those that cannot become the fastest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tf_ooo.planning.choosing.plan import NO_LIMIT, STEADY, Candidate, StepTime, tried
from tf_ooo.planning.choosing.recomputing import ALL, NONE, kept_within, slower_text
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import Policy

# Predictions are wrong by more.
_LEAST_GAIN = 0.005


def fastest_first(asked: Sequence[tuple[Policy, Problem]], step_time: StepTime = STEADY) -> list[Candidate]:
    """Return a candidate for each policy and problem with a limit, in their order.

    Each is planned without the limit first, which takes little time.  The search within it (leaner schedules,
    layers that run again) begins with policies that plan quickly, goes from the fastest on, and leaves out
    those that even without the limit are not faster by 0.5% than the best that was found within it.
    """
    free = [
        tried(policy, dataclasses.replace(problem, memory_limit_bytes=NO_LIMIT, recompute=NONE), step_time)
        for policy, problem in asked
    ]
    rows: dict[int, Candidate] = {}
    best_s = math.inf

    def rank(number: int) -> tuple[bool, float]:
        """Put those first whose search takes less time, then the faster ones."""
        return asked[number][0].auto_tasks is not None, free[number].step_s

    for number in sorted(range(len(asked)), key=rank):
        (policy, problem), unlimited = asked[number], free[number]
        if (trial := unlimited.trial) is None:
            rows[number] = dataclasses.replace(unlimited, problem=problem)
        elif unlimited.step_s > best_s * (1 - _LEAST_GAIN):
            reason = slower_text(unlimited.step_s, best_s)
            rows[number] = Candidate(policy.name, problem, reason=reason)
        elif problem.recompute != ALL and (kept := kept_within(trial, problem)):
            rows[number] = dataclasses.replace(unlimited, problem=kept.problem, trial=kept)
        else:
            rows[number] = tried(policy, problem, step_time, to_beat_s=best_s, unlimited=trial)
        best_s = min(best_s, rows[number].step_s)
    return [rows[number] for number in range(len(asked))]
