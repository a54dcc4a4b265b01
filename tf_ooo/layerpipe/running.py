"""An epoch of rounds: batches come in, results come out in their order, and at the end nothing is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tf_ooo.layerpipe.ticks import Ticks

Batches = Callable[[], Any]


class Epoch:
    """From the first batch of an epoch to the last.

    Args:
        ticks: runs rounds.
        batch_round, results_round: when a batch comes in, and when its results do.
        batches: the next batch's tensors, or None at the end of the data.
    """

    def __init__(self, ticks: Ticks, batch_round: int, results_round: int, batches: Batches) -> None:
        self._ticks, self._batches = ticks, batches
        self._batch_round, self._results_round = batch_round, results_round
        self._round = 0
        self._taken = 0
        self._count: int | None = None
        self._results: deque[Any] = deque()
        self._given = 0

    def step(self) -> Any:
        """The results of the next batch; None where the data have ended.

        After the last batch's all rounds have run: no gradient is on its way.
        """
        while not self._results and not self._finished:
            self._next_round()
        if not self._results:
            return None
        self._given += 1
        if self._count is not None and self._given == self._count:
            self.drain()
        return self._results.popleft()

    @property
    def _finished(self) -> bool:
        return self._count is not None and self._round >= self._count + self._ticks.last

    def drain(self) -> None:
        """No more batches come in; those on their way are finished."""
        if self._count is None:
            self._count = self._taken
        while not self._finished:
            self._next_round()

    def _next_round(self) -> None:
        batch = None
        if self._count is None and self._round >= self._batch_round:
            batch = self._batches()
            if batch is None:
                self._count = self._taken
            else:
                self._taken += 1
        low, high = 0, min(self._ticks.last, self._round)
        if self._count is not None:
            low = max(0, self._round - self._count + 1)
            if low > high:
                self._round += 1
                return
        feeds = low <= self._batch_round <= high
        results = self._ticks.run(low, high, batch if feeds else None)
        if low <= self._results_round <= high:
            self._results.append(results)
        self._round += 1
