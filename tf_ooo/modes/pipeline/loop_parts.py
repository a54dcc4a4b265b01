"""Chooses how many loops the time steps of recurrent layers run in: cuts are between loops."""

from __future__ import annotations

import math

AUTO = "auto"
# So many loops for each device: the slowest stage is then at most half a device's share too long.
_LOOPS_PER_DEVICE = 2


def loop_parts(asked: int | str, recurrent: int, devices: int, microbatches: int) -> int:
    """Loops of each of so many recurrent layers; 1: they stay whole.

    By itself nothing is parted where each device may have a layer, or one micro-batch leaves nothing to do at
    the same time.
    """
    if asked != AUTO:
        return int(asked)
    if not recurrent or recurrent >= devices or microbatches < 2:
        return 1
    return math.ceil(_LOOPS_PER_DEVICE * devices / recurrent)
