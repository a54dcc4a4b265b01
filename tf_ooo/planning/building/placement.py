"""Deals stages out to devices with several each: F, dO and dW of all devices are to be alike.

A device whose three sums are equal to the mean can be busy all the time.  F counts by itself because nothing
else can run until the first micro-batch has been through, F and dO because dW fills what they leave.

Of p devices each has one of the first p stages, one of the next p and so on (a round): a device without an
early stage would begin late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints

# (weight of F and of dO beside the sum of all three, the power that makes the largest count most).
_TASTES = ((0.1, 8), (0.1, 16), (0.3, 8), (0.3, 16), (1.0, 8), (1.0, 16))
_SWEEPS = 20


def placements(seconds: Floats, devices: int) -> Iterator[Ints]:
    """Yield stages in turn, then balanced, int64 (stages,); ``seconds`` of F, dO and dW, (3, stages)."""
    in_turn = np.arange(seconds.shape[1]) % devices
    yield in_turn
    for weight, power in _TASTES:
        yield _Balancing(seconds, devices, weight, power).balanced(in_turn)


@dataclass
class _Balancing:
    """Loads are shares of their mean over all devices: all three kinds, F, dO; shape (3, devices)."""

    seconds: Floats
    devices: int
    weight: float
    power: int

    def balanced(self, start: Ints) -> Ints:
        """Balance by exchanging two stages of a round as long as that makes loads more alike."""
        loads = np.stack([self.seconds.sum(axis=0), self.seconds[0], self.seconds[1]])
        means = loads.sum(axis=1, keepdims=True) / self.devices
        self.loads: Floats = loads / np.where(means > 0, means, 1.0)
        self.place = start.copy()
        self.of_device = self._of_device()
        for _ in range(_SWEEPS):
            if not sum(self._improve(stage) for stage in range(len(start))):
                break
        return self.place

    def _cost(self, loads: Floats) -> Floats:
        weights = np.array([1.0, self.weight, self.weight])
        cost: Floats = weights @ loads**self.power
        return cost

    def _improve(self, stage: int) -> bool:
        """Exchanges the stage with another of its round, where that is better; whether it did."""
        here, there, of_stage, loads = self.place[stage], self.place, self.loads[:, [stage]], self.of_device
        left, rounds = loads[:, [here]] - of_stage, np.arange(len(there)) // self.devices
        cost = self._cost(loads)
        exchanged = self._cost(left + self.loads) + self._cost(loads[:, there] - self.loads + of_stage)
        allowed = (there != here) & (rounds == rounds[stage])
        gains = np.where(allowed, cost[here] + cost[there] - exchanged, 0.0)
        other = int(gains.argmax())
        if gains[other] <= 1e-9:
            return False
        self.place[stage], self.place[other] = there[other], here
        self.of_device = self._of_device()
        return True

    def _of_device(self) -> Floats:
        return np.stack([np.bincount(self.place, row, self.devices) for row in self.loads]).astype(float)
