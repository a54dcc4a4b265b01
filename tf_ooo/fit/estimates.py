"""Estimates how long tracing a step and placing it will take, from what a smaller trace took.

Of six models (dense layers, LSTMs, a transformer, three convolutional networks) a step in 4 and in 8
micro-batches took 5 to 20 and 9 to 23 times as long as a forward and backward pass that is traced alone, a
stock step 6 to 9 times, and placing a fifth to a third of the step that was traced before it.  Comparing
rows took 1.8 to 2.7 times as long as tracing the first such pass.
"""

from __future__ import annotations

from tf_ooo.units import about_count

_WHOLE, _EACH = 8.0, 1.0
_STOCK = 8.0
_PLACING = 0.25
_LOOK = 2.0


def micro_batches_s(pass_s: float, microbatches: int) -> float:
    """Return seconds of a first step in micro-batches; ``pass_s``: of the pass that was traced alone."""
    return (_WHOLE + _EACH * microbatches) * pass_s


def look_s(first_pass_s: float) -> float:
    """Return seconds in which rows are compared; ``first_pass_s``: of the first pass that was traced."""
    return _LOOK * first_pass_s


def stock_s(first_s: float, microbatches: int) -> float:
    """Return seconds of a first stock step; ``first_s``: of the one in micro-batches."""
    return first_s * _STOCK / (_WHOLE + _EACH * microbatches)


def placing_s(first_s: float) -> float:
    """Return seconds in which a step that was traced for one device is placed on several."""
    return _PLACING * first_s


def pays_from(spent_s: float, one_s: float, ours_s: float | None) -> str:
    """Say from how many steps on what was ``spent_s`` is gained back; empty: nobody knows.

    ``spent_s``: without what stock would have taken.  ``one_s``: of a stock step; ``ours_s``: of one on
    several devices, as predicted.
    """
    if ours_s is None:
        return ""
    if ours_s >= one_s:
        return "; no gain over one device is predicted"
    return f"; it pays from about {about_count(spent_s / (one_s - ours_s))} steps on"
