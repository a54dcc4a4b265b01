"""Plans within a memory limit: what would be slower even without the limit is not looked at further.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tf_ooo.planning.choosing.plan import Candidate, Clock, tried
from tf_ooo.planning.choosing.recompute import ALL, NONE
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import Policy
from tf_ooo.units import seconds_text

# Predictions are wrong by more.
_LEAST_GAIN = 0.005
_ABOUT = math.log(1.02)
_NO_LIMIT = 1 << 62


def fastest_first(asked: Sequence[tuple[Policy, Problem]], clock: Clock) -> list[Candidate]:
    """Return a candidate for each policy and problem with a limit, in their order.

    Each is planned without the limit first, which takes little time.  A limit makes no schedule faster, so
    the search within it (leaner schedules, layers that run again) goes from the fastest of these on, and ends
    where even they would be faster by less than 0.5% than the best that was found within the limit.
    """
    free = [_free(policy, problem, clock) for policy, problem in asked]
    rows: dict[int, Candidate] = {}
    best_s = math.inf

    def rank(number: int) -> tuple[float, bool, float]:
        """Rank by step time; of about equal ones, those whose search takes less time come first."""
        step_s = free[number].step_s
        about = math.floor(math.log(step_s) / _ABOUT) if 0 < step_s < math.inf else step_s
        return about, asked[number][0].auto_tasks is not None, step_s

    for number in sorted(range(len(asked)), key=rank):
        (policy, problem), unlimited = asked[number], free[number]
        if unlimited.trial is None:
            rows[number] = dataclasses.replace(unlimited, problem=problem)
        elif unlimited.step_s > best_s * (1 - _LEAST_GAIN):
            taken = seconds_text(unlimited.step_s)
            reason = f"takes {taken} without the limit already, another {seconds_text(best_s)} within it"
            rows[number] = Candidate(policy.name, problem, reason=reason)
        else:
            rows[number] = _kept(unlimited, problem) or tried(policy, problem, clock)
            best_s = min(best_s, rows[number].step_s)
    return [rows[number] for number in range(len(asked))]


def _free(policy: Policy, problem: Problem, clock: Clock) -> Candidate:
    # With a limit, though none that matters, policies search less.
    return tried(policy, dataclasses.replace(problem, memory_limit_bytes=_NO_LIMIT, recompute=NONE), clock)


def _kept(unlimited: Candidate, problem: Problem) -> Candidate | None:
    """Return the schedule without the limit, if it keeps it as it is."""
    trial = unlimited.trial
    if trial is None or problem.recompute == ALL or not problem.keeps_limit(trial.timeline.peak_bytes):
        return None
    asked = dataclasses.replace(problem, recompute=NONE)
    return dataclasses.replace(unlimited, problem=asked, trial=dataclasses.replace(trial, problem=asked))
