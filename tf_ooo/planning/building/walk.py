"""Is the one local search: it goes from state to state, each a change of the one before, and keeps the
best."""

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
        changed: returns a state near the given one; None is no state to go to.
        seconds: what a state takes.
        turns: for each change, the share of ``tolerance`` that counts by then.
        bound_s: nothing is faster, so that the walk ends there.
        tolerance: a state may be slower than the last by this share, and than the best by twice as much.
        patience: the walk ends after so many changes without a new best; None: it does not.
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
