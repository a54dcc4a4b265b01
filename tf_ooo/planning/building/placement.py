"""Which device runs which stage, where several run on each: F, dO and dW of all devices alike.

A device whose three sums are equal to the mean can be busy all the time.  F counts by itself because nothing
else can run until the first micro-batch has been through, F and dO because dW fills what they leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints

# (weight of F and of dO beside the sum of all three, the power that makes the largest count most).
_TASTES = ((0.1, 8), (0.1, 16), (0.3, 8), (0.3, 16))
_SWEEPS = 20


def placements(seconds: Floats, devices: int) -> Iterator[Ints]:
    """In turn, then balanced ones, int64 (stages,); ``seconds`` of F, dO and dW of each stage, (3, stages).

    Each device has a stage.
    """
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
        """By exchanging two stages, or moving one, as long as that makes loads more alike."""
        loads = np.stack([self.seconds.sum(axis=0), self.seconds[0], self.seconds[1]])
        means = loads.sum(axis=1, keepdims=True) / self.devices
        self.loads = loads / np.where(means > 0, means, 1.0)
        self.place = start.copy()
        self.of_device = np.stack([np.bincount(start, row, self.devices) for row in self.loads])
        for _ in range(_SWEEPS):
            if not sum(self._improve(stage) for stage in range(len(start))):
                break
        return self.place

    def _cost(self, loads: Floats) -> Floats:
        weights = np.array([1.0, self.weight, self.weight])
        cost: Floats = weights @ loads**self.power
        return cost

    def _improve(self, stage: int) -> bool:
        """Exchanges the stage with another, or moves it, where that is best; whether it did."""
        here, of_stage, loads = self.place[stage], self.loads[:, stage], self.of_device
        cost, left = self._cost(loads), loads[:, here] - of_stage
        there = self.place
        exchanged = self._cost(left[:, None] + self.loads)
        exchanged = exchanged + self._cost(loads[:, there] - self.loads + of_stage[:, None])
        gains = np.where(there != here, cost[here] + cost[there] - exchanged, 0.0)
        other = int(gains.argmax())
        moves = np.zeros(self.devices)
        if np.count_nonzero(self.place == here) > 1:
            moved = self._cost(left[:, None])[0] + self._cost(loads + of_stage[:, None])
            moves = np.where(np.arange(self.devices) != here, cost[here] + cost - moved, 0.0)
        device = int(moves.argmax())
        if max(gains[other], moves[device]) <= 1e-9:
            return False
        if gains[other] >= moves[device]:
            self.place[other], device = here, int(there[other])
        self.place[stage] = device
        self.of_device = np.stack([np.bincount(self.place, row, self.devices) for row in self.loads])
        return True
