"""An epoch of rounds: batches come in, results come out in their order, and at the end nothing is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Batches = Callable[[], Any]


class Runs(Protocol):
    """What an epoch needs of :class:`tf_ooo.modes.layerpipe.ticks.Ticks`."""

    @property
    def last(self) -> int:
        """The last round of a batch."""

    def run(self, low: int, high: int, batch: Any) -> Any:
        """One round."""

    def run_full(self, batches: Sequence[Any]) -> list[Any]:
        """Several rounds, in which batches are in all rounds."""


class Epoch:
    """From the first batch of an epoch to the last.

    Args:
        ticks: runs rounds.
        batch_round, results_round: when a batch comes in, and when its results do.
        batches: the next batch's tensors, or None at the end of the data.
        together: so many rounds are run as one, where batches are in all of them.

    Attributes:
        rounds: how many have run.
    """

    def __init__(
        self, ticks: Runs, batch_round: int, results_round: int, batches: Batches, together: int = 1
    ) -> None:
        self._ticks, self._batches, self._together = ticks, batches, together
        self._batch_round, self._results_round = batch_round, results_round
        self.rounds = 0
        self._taken = 0
        self._count: int | None = None
        self._ahead: deque[Any] = deque()
        self._data_ended = False
        self._results: deque[Any] = deque()
        self._given = 0

    def step(self) -> Any:
        """The results of the next batch; None where the data have ended.

        After the last batch's all rounds have run: no gradient is on its way.
        """
        while not self._results and not self._finished:
            self._next_rounds()
        if not self._results:
            return None
        self._given += 1
        if self._count is not None and self._given == self._count:
            self.drain()
        return self._results.popleft()

    @property
    def _finished(self) -> bool:
        return self._count is not None and (not self._count or self.rounds >= self._count + self._ticks.last)

    @property
    def ahead(self) -> int:
        """How many batches have been taken from the data whose results nobody has seen."""
        return self._taken + len(self._ahead) - self._given

    def drain(self) -> None:
        """No more batches are taken; those on their way are finished."""
        self._data_ended = True
        if not self._ahead:
            self._count = self._taken
        while not self._finished:
            self._next_rounds()

    def _look_ahead(self, count: int) -> None:
        """Takes batches, until there are so many that have not come in yet."""
        while len(self._ahead) < count and not self._data_ended:
            batch = self._batches()
            if batch is None:
                self._data_ended = True
            else:
                self._ahead.append(batch)

    def _next_rounds(self) -> None:
        full = self._count is None and self.rounds >= self._ticks.last
        self._look_ahead(self._together if full else 1)
        if full and self._together > 1 and len(self._ahead) == self._together:
            self._results += self._ticks.run_full(list(self._ahead))
            self._ahead.clear()
            self._taken += self._together
            self.rounds += self._together
        else:
            self._next_round()

    def _next_round(self) -> None:
        batch = None
        if self._count is None and self.rounds >= self._batch_round:
            if self._ahead:
                batch = self._ahead.popleft()
                self._taken += 1
            else:
                self._count = self._taken
        low, high = 0, min(self._ticks.last, self.rounds)
        if self._count is not None:
            low = max(0, self.rounds - self._count + 1)
            if low > high:
                return
        feeds = low <= self._batch_round <= high
        results = self._ticks.run(low, high, batch if feeds else None)
        if low <= self._results_round <= high:
            self._results.append(results)
        self.rounds += 1
