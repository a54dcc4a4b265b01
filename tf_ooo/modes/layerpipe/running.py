"""An epoch of rounds: batches come in, results come out in their order, and at the end nothing is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.compat import iterators, nests
from tf_ooo.modes.layerpipe.ticks import Ticks

# Rounds in one function, and the ops of all of them: a large graph takes TensorFlow long.
_ROUNDS, _OPS = (8, 4, 2), 20_000


class Batches:
    """Takes the batches of an epoch out of Keras' iterator.

    ``of_epoch``: how many there are, if known: Keras counts the steps, the data may go on.
    ``taken``: in this epoch.
    """

    def __init__(self, of_epoch: int | None) -> None:
        self.taken = 0
        self._of_epoch = of_epoch
        self._waiting: list[Any] = []

    def look(self, iterator: Iterator[Any]) -> Any:
        """Return the batch that comes next; None at the end of the data."""
        self._waiting = self._waiting or iterators.take(iterator, 1)
        return self._waiting[0] if self._waiting else None

    def take(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch; None at the end of the data."""
        batch = self.look(iterator)
        self.taken += len(self._waiting)
        self._waiting = []
        return batch

    def take_of_epoch(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch; None at the end of the epoch."""
        ended = self._of_epoch is not None and self.taken >= self._of_epoch
        return None if ended else self.take(iterator)


class Epoch:
    """Runs the rounds from an epoch's first batch to the last; ``rounds``: how many have run.

    ``batches`` gives the next batch's tensors, or None at the end of the data.  ``together``: so many rounds
    are run as one, where batches are in all of them.
    """

    def __init__(
        self, ticks: Ticks, batches: Callable[[], Sequence[tf.Tensor] | None], together: int = 1
    ) -> None:
        self._ticks, self._batches, self._together = ticks, batches, together
        self.rounds = 0
        self._taken = self._given = 0
        self._count: int | None = None  # of all batches, once the data have ended
        self._ahead: deque[Sequence[tf.Tensor]] = deque()
        self._data_ended = False
        self._results: deque[Any] = deque()

    def timed_step(self, step_s: deque[float]) -> Any:
        """Run :meth:`step`; add its rounds' mean seconds, if none of them was traced."""
        started, rounds, functions = time.perf_counter(), self.rounds, self._ticks.traced_functions
        outputs = self.step()
        if outputs is not None:
            nests.synchronize(outputs)
        ran = self.rounds - rounds
        if ran and self._ticks.traced_functions == functions:
            step_s.append((time.perf_counter() - started) / ran)
        return outputs

    def step(self) -> Any:
        """Return the results of the next batch; None where the data have ended.

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
        """Return how many batches have been taken from the data whose results nobody has seen."""
        return self._taken + len(self._ahead) - self._given

    def is_full(self) -> bool:
        """Say whether the next step runs rounds with batches in all of them; takes the batches it needs."""
        if self._results or self._count is not None or self.rounds < self._ticks.last:
            return False
        self._look_ahead(self._together)
        return bool(self._ahead)

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
        if full and len(self._ahead) == self._together:
            self._run(0, self._ticks.last, self._together)
            return
        if self._count is None and self.rounds >= self._ticks.batch_round and not self._ahead:
            self._count = self._taken
        low = 0 if self._count is None else max(0, self.rounds - self._count + 1)
        high = min(self._ticks.last, self.rounds)
        if low <= high:
            self._run(low, high, 1)

    def _run(self, low: int, high: int, rounds: int) -> None:
        feeds = self._count is None and low <= self._ticks.batch_round <= high
        batches = [self._ahead.popleft() if feeds else None for _ in range(rounds)]
        self._results += self._ticks.run(low, high, batches)
        self._taken += rounds if feeds else 0
        self.rounds += rounds


def rounds_together(ops: int) -> int:
    """Return how many rounds of so many ops may run as one function."""
    return next((count for count in _ROUNDS if count * ops <= _OPS), 1)


def structure_of(batch: object) -> Any:
    """Return what all batches have in common: parts, types, all dimensions but the first."""
    specs = nests.Packed(batch).specs
    return nests.signature(batch)[0], [(spec.dtype, tuple(spec.shape[1:])) for spec in specs]
