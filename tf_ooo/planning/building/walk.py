"""Defines the one local search: it walks from state to neighbouring state and keeps the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

State = TypeVar("State")


def walk(
    start: State,
    changed: Callable[[State], State | None],
    seconds: Callable[[State], float],
    turns: Iterable[float],
    *,
    bound_s: float = 0.0,
    tolerance: float = 0.0,
    patience: int | None = None,
) -> State:
    """Return the fastest state on the way (threshold accepting, Dueck and Scheuer 1990).

    Args:
        start: where to begin.
        changed: returns a state near the given one, or None where it finds none.
        seconds: returns the seconds of a state.
        turns: yields for each change the share of ``tolerance`` that still counts.
        bound_s: a lower bound, at which the walk ends.
        tolerance: a state may be slower than the last by this share, and than the best by twice as much.
        patience: the walk ends after so many changes without a new best; None: never.
    """
    here = best = start
    since = 0
    for share in turns:
        if seconds(best) <= bound_s or (patience is not None and since > patience):
            break
        since += 1
        there = changed(here)
        if there is None:
            continue
        slowest_s = min(seconds(here) * (1 + tolerance * share), seconds(best) * (1 + 2 * tolerance))
        if seconds(there) <= slowest_s:
            here = there
        if seconds(here) < seconds(best):
            best, since = here, 0
    return best
