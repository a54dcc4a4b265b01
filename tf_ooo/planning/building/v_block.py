"""Building blocks of V-shaped pipelines (arXiv 2405.15362, section 3): stages s and 2p-1-s are on device s.

A block says at which tick one micro-batch's F, F, dO and dO run on each device; it is repeated some ticks
later, and dW go where a device is free.  Longer blocks store more activations and leave fewer bubbles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from tf_ooo.planning.model.schedule import Task

# F, dO and dW of two stages: a device is busy all the time if blocks follow each other this closely.
FULL_PERIOD = 6
_GAPS = 6


@dataclass(frozen=True)
class Steps:
    """Ticks from one device to the next of F down, F back, dO down and dO back (section 3.3)."""

    forward: int
    forward_back: int
    output_grad: int
    output_grad_back: int


# A device stores about (2 forward_back + 2 output_grad) p / 6 stages' activations.
ZB = Steps(4, 2, 4, 2)
HALF = Steps(2, 1, 2, 1)
MIN = Steps(1, 1, 1, 1)


@dataclass(frozen=True)
class Block:
    """Ticks of (F, F back, dO, dO back) on each device; repeated, it stores ``limit`` stage activations."""

    ticks: tuple[tuple[int, int, int, int], ...]
    period: int
    limit: int


@lru_cache
def block(steps: Steps, devices: int, period: int = FULL_PERIOD) -> Block:
    """The block with these steps and the waits at the turns that store least and are shortest."""
    blocks = []
    for gaps in itertools.product(range(_GAPS), repeat=3):
        if sum(gaps) > _GAPS:
            continue
        ticks = _ticks(steps, devices, gaps)
        if all(len({tick % period for tick in device}) == len(device) for device in ticks):
            peak = max(_peak(device, period) for device in ticks)
            blocks.append((peak, sum(gaps), gaps, Block(ticks, period, peak)))
    return min(blocks, key=lambda row: row[:3])[-1]


def sequential(devices: int) -> Block:
    """Return one micro-batch after the other: the fewest activations."""
    ticks = _ticks(MIN, devices, (0, 0, 0))
    return Block(ticks, 4 * devices + 2, 2)


def _ticks(steps: Steps, devices: int, gaps: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    last = devices - 1
    back = steps.forward * last + 1 + gaps[0]
    down = back + steps.forward_back * last + 1 + gaps[1]
    home = down + steps.output_grad * last + 1 + gaps[2]
    return tuple(
        (
            steps.forward * device,
            back + steps.forward_back * (last - device),
            down + steps.output_grad * device,
            home + steps.output_grad_back * (last - device),
        )
        for device in range(devices)
    )


def _peak(ticks: tuple[int, ...], period: int) -> int:
    """Return activations that the repeated block stores on one device: from F to dW."""
    repeats = ticks[-1] // period + 3
    changes = [(tick + period * m, 1) for tick in ticks[:2] for m in range(repeats)]
    changes += [(tick + 1, -1) for tick, _, _ in _weight_grads(ticks, period, repeats)]
    alive = itertools.accumulate(change for _, change in sorted(changes))
    return max(alive)


def _weight_grads(ticks: tuple[int, ...], period: int, microbatches: int) -> list[tuple[int, int, int]]:
    """(tick, place of the dO in ``ticks``, micro-batch): each dW in the first free tick after its dO."""
    taken = {tick + period * m for tick in ticks for m in range(microbatches)}
    done = sorted((ticks[place] + period * m, place, m) for place in (2, 3) for m in range(microbatches))
    slots, free = [], 0
    for tick, place, microbatch in done:
        free = max(free, tick + 1)
        while free in taken:
            free += 1
        slots.append((free, place, microbatch))
        free += 1
    return slots


def lanes(of: Block, microbatches: int) -> list[list[Task]]:
    """Return the order of tasks on each device."""
    devices = len(of.ticks)
    orders = []
    for device, ticks in enumerate(of.ticks):
        there, back = device, 2 * devices - 1 - device
        kinds = (("F", there), ("F", back), ("dO", back), ("dO", there))
        timed = [
            (tick + of.period * m, Task(kind, stage, m))
            for tick, (kind, stage) in zip(ticks, kinds, strict=True)
            for m in range(microbatches)
        ]
        for tick, place, m in _weight_grads(ticks, of.period, microbatches):
            timed.append((tick, Task("dW", kinds[place][1], m)))
        orders.append([task for _, task in sorted(timed, key=lambda row: row[0])])
    return orders
