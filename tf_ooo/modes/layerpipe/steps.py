"""Batches that come in, and the steps of a model that is spread over devices."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from tf_ooo.compat import iterators, nests
from tf_ooo.errors import BackendError
from tf_ooo.modes.layerpipe.running import Epoch
from tf_ooo.modes.layerpipe.spread import Spread

# Rounds in one function, and the ops of all of them: a large graph takes TensorFlow long.
_ROUNDS, _OPS = (8, 4, 2), 20_000


class Batches:
    """Takes the batches of an epoch out of Keras' iterator.

    Args:
        of_epoch: how many there are, if known: Keras counts the steps, the data may go on.

    Attributes:
        taken: in this epoch.
    """

    def __init__(self, of_epoch: int | None) -> None:
        self.taken = 0
        self._of_epoch = of_epoch
        self._waiting: list[Any] = []

    def look(self, iterator: Any) -> Any:
        """The batch that comes next; None at the end of the data."""
        self._waiting = self._waiting or iterators.take(iterator, 1)
        return self._waiting[0] if self._waiting else None

    def take(self, iterator: Any) -> Any:
        """The next batch; None at the end of the data."""
        batch = self.look(iterator)
        self.taken += len(self._waiting)
        self._waiting = []
        return batch

    def take_of_epoch(self, iterator: Any) -> Any:
        """The next batch; None at the end of the epoch."""
        ended = self._of_epoch is not None and self.taken >= self._of_epoch
        return None if ended else self.take(iterator)


class SpreadSteps:
    """The rounds of a model that is spread.

    Args:
        spread: over its devices.
        batch: the first; all have its parts.
        group: so many batches are one update; None: one is.
        together: so many rounds are one function; None: as many as their ops allow.
        step_s: is given the seconds of rounds in which nothing was traced.
    """

    def __init__(
        self, spread: Spread, batch: Any, group: int | None, together: int | None, step_s: deque[float]
    ) -> None:
        small = (count for count in _sizes(group) if count * len(spread.traced.index) <= _OPS)
        self._spread, self._step_s = spread, step_s
        self._together = together or next(small, 1)
        self._structure = _structure(batch)
        self._epoch: Epoch | None = None

    def tensors(self, batch: Any) -> list[Any]:
        """Of a batch.  Raises BackendError where it has other parts than the first."""
        if _structure(batch) != self._structure:
            raise BackendError("a batch has other parts than the first: this mode needs batches of one kind")
        return list(nests.Packed(batch).tensors)

    def begin(self, batches: Iterator[list[Any]]) -> None:
        """From the next batch to the last one that the iterator gives."""
        spread = self._spread
        spread.ticks.reset()
        following = functools.partial(next, batches, None)
        logs_round = spread.delays.logs_round
        self._epoch = Epoch(spread.ticks, spread.rounds.batch, logs_round, following, self._together)

    def step(self) -> Any:
        """As many rounds as it takes for the next batch's results; None where no batch is on its way."""
        epoch, ticks = self._epoch, self._spread.ticks
        if epoch is None:
            return None
        started, rounds, functions = time.perf_counter(), epoch.rounds, ticks.traced_functions
        outputs = epoch.step()
        if outputs is not None:
            nests.synchronize(outputs)
        ran = epoch.rounds - rounds if ticks.traced_functions == functions else 0
        self._step_s += [(time.perf_counter() - started) / ran] * ran if ran else []
        return outputs

    @property
    def ahead(self) -> int:
        """Batches that have come in and whose results nobody has seen."""
        return 0 if self._epoch is None else self._epoch.ahead

    def drain(self) -> None:
        """Finishes what is on its way; no more batches come in."""
        if self._epoch is not None:
            self._epoch.drain()

    def end(self) -> None:
        """Nothing is on its way."""
        self._epoch = None


def _structure(batch: Any) -> Any:
    """What all batches have in common: parts, types, all dimensions but the first."""
    return nests.signature(batch)[0], [
        (spec.dtype, tuple(spec.shape[1:])) for spec in nests.Packed(batch).specs
    ]


def _sizes(group: int | None) -> Sequence[int]:
    """How many rounds may run as one function, most first.

    With groups of batches a multiple or a part of a group: else each function would begin in another phase
    of the group, and each phase is a function of its own.
    """
    if group is None:
        return _ROUNDS
    most = max(_ROUNDS[0], group)
    return [count for count in range(most, 1, -1) if count % group == 0 or group % count == 0]
