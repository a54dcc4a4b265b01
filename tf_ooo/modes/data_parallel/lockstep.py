"""All ranks run as many steps: none waits for a rank that has run out of data or has stopped.

A rank that hears another kind of message than its own knows what the others are doing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from tf_ooo.compat import keras_fits, train_function
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.ranks.base import Engine, Message, naming_the_lost

if TYPE_CHECKING:
    import keras


_LOG = logging.getLogger("tf_ooo")
Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True)
class EpochBegins(Message):
    """Told when one does; the ``steps`` of this rank, if known."""

    epoch: int
    steps: int | None


@dataclass(frozen=True)
class MayRun(Message):
    """Told before each execution, if asked for: this rank has data for so many ``steps``."""

    steps: int


@dataclass(frozen=True)
class EpochEnds(Message):
    """Told when one does: logs, the samples behind those of training and of validation, the weights' bits."""

    logs: Mapping[str, float] = field(default_factory=dict)
    train_samples: float = 0.0
    test_samples: float = 0.0
    weights: int = 0


@dataclass(frozen=True)
class CallbacksRan(Message):
    """Told when all have heard of an epoch: whether one of them has stopped the training."""

    stop: bool


@dataclass(frozen=True)
class TrainingEnds(Message):
    """Told after the last epoch: the weights' bits, which callbacks may have put back; did a step run?"""

    weights: int = 0
    trained: bool = True


class Lockstep:
    """Counts how many steps this rank may run.

    Args:
        asks: before each execution whether all go on, which costs a message but lets one rank alone stop
            within an epoch.  Done in any case where the number of batches is not known.
        counts: asks with the batches in hand, whatever numbers are known: the data of one may end earlier.
    """

    def __init__(self, engine: Engine, asks: bool = False, counts: bool = False) -> None:
        self.engine, self.asks, self.counts = engine, asks, counts
        self.left: int | None = None  # steps left in this epoch; None: agree before each execution
        self.of_epoch: int | None = None  # steps of this epoch, where all ranks know them
        self.others_ended = False
        self.trained = True  # whether a rank has run a step, as far as they have told
        self._told = False

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """Agrees on the number of steps of an epoch.  OptionsError: the ranks are at different epochs."""
        replies = self._exchange(EpochBegins(epoch, steps))
        if not replies:
            return
        epochs = [reply.epoch for reply in replies]
        if len(set(epochs)) > 1:
            raise OptionsError(
                f"the ranks are at different epochs (rank 0, 1, ...: {epochs}); pass the same "
                "initial_epoch, and list BackupAndRestore before OOOBackprop"
            )
        counts = [reply.steps for reply in replies]
        known = [count for count in counts if count is not None]
        if self.counts or len(known) < len(counts):
            self.left = self.of_epoch = None
            return
        self.left = self.of_epoch = least = min(known)
        if max(known) != least and not self._told:
            self._told = True
            _LOG.warning(
                "the ranks have %s batches an epoch (rank 0, 1, ...): each epoch ends after %d", counts, least
            )

    def may_run(self, available: int) -> int:
        """Return how many of the ``available`` steps all ranks run now; 0: the epoch is over."""
        if self.others_ended:
            return 0
        count = available if self.left is None else min(available, self.left)
        if self.left is None or self.asks:
            count = min((reply.steps for reply in self._exchange(MayRun(count))), default=0)
        if self.left is not None:
            self.left -= count
        return count

    def did_not_run(self, count: int) -> None:
        """Takes back what :meth:`may_run` allowed: the data had ended."""
        if self.left is not None:
            self.left += count

    def end_epoch(self, mine: EpochEnds) -> list[EpochEnds]:
        """Exchange what every rank has to say about the epoch; only ``mine`` if the others have ended."""
        return self._exchange(mine) or [mine]

    def stops(self, mine: bool) -> bool:
        """Return whether a callback of any rank has stopped the training."""
        return any(reply.stop for reply in self._exchange(CallbacksRan(mine))) or mine or self.others_ended

    def end(self, weights: int = 0, trained: bool = True) -> bool:
        """Says that this rank trains no more; whether all that end now have the same weights."""
        replies = self._exchange(TrainingEnds(weights, trained))
        self.trained = not replies or any(reply.trained for reply in replies)
        return len({reply.weights for reply in replies}) <= 1

    def _exchange(self, mine: Kind) -> list[Kind]:
        """Return the ranks' messages of this kind; none if some do something else, so that this is over."""
        while not self.others_ended:
            replies = mine.told(self.engine)
            if all(isinstance(reply, type(mine)) for reply in replies):
                return replies
            if isinstance(mine, TrainingEnds):
                break
            ended = [str(rank) for rank, reply in enumerate(replies) if isinstance(reply, TrainingEnds)]
            if ended:
                self.others_ended = True
                _LOG.warning("rank %s ended training: this rank stops too", ", ".join(ended))
            elif not isinstance(mine, EpochEnds):
                break
            # The others are told of the end before a batch: they end the epoch and say so, too.
        return []


class ParallelStep:
    """Callable in place of the train function.

    Args:
        function: the train function that averages.
        on_batches: called with the batches of an execution and their iterator in place of ``function``, if
            given: what runs several steps together must not run out of data in the middle.
        prepare: called once, with the first batch and the iterator, before the first step of a ``fit``.
        verify: called once, after that step.
        steps_known: ``fit`` knows how many steps an epoch has.

    Raises (from a call): whatever the step raises; StopIteration where the epoch is over for some rank
    (Keras 2 would end all training if it expects more steps: it gets the last logs once more, without a
    step); BackendError when another rank is gone.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        engine: Engine,
        lockstep: Lockstep,
        model: keras.Model,
        prepare: Callable[[Any, Any], None],
        verify: Callable[[], None],
        on_batches: Callable[[list[Any], Any], Any] | None = None,
        steps_known: bool = True,
    ) -> None:
        self.function, self.engine, self.lockstep, self.model = function, engine, lockstep, model
        self._prepare, self._verify, self._on_batches = prepare, verify, on_batches
        self.prepared = False
        self.executions = 0
        self._last: Any = None
        self._fit_expects_more = steps_known and keras_fits.ends_training_without_data(model)

    def __call__(self, iterator: object) -> Any:
        """Return one execution: ``steps_per_execution`` steps, or as many as all ranks have data for."""
        with naming_the_lost(self.engine, f"in execution {self.executions + 1}"):
            return self._run(iterator)

    def _run(self, iterator: object) -> Any:
        wanted = train_function.steps_per_execution(self.model)
        taken = None
        if not self.prepared:
            # No more than are trained on: a data set that repeats goes on behind them in the next epoch.
            taken = train_function.take(iterator, min(wanted, self.lockstep.left or wanted))
            self._prepare(taken[0] if taken else None, iterator)
        if self.lockstep.left is not None:
            count = self.lockstep.may_run(wanted)
        else:
            taken = train_function.take(iterator, wanted) if taken is None else taken
            count = self.lockstep.may_run(len(taken))
        if count == 0:
            self.model.stop_training = self.model.stop_training or self.lockstep.others_ended
            if self._fit_expects_more and self._last is not None:
                return self._last
            # Keras 2 takes the first epoch's number of steps for that of all, where it did not know.
            self._fit_expects_more = keras_fits.ends_training_without_data(self.model)
            raise StopIteration
        outputs = self._execute(iterator, taken, count, wanted)
        self.executions += 1
        if not self.prepared:
            self._verify()
            self.prepared = True
        self._last = outputs
        return outputs

    def _execute(self, iterator: object, taken: list[Any] | None, count: int, wanted: int) -> Any:
        if taken is None and wanted == 1 and self._on_batches is None:
            try:
                return self.function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                self.lockstep.did_not_run(1)
                raise
        taken = train_function.take(iterator, count) if taken is None else taken[:count]
        if self._on_batches is not None:
            if len(taken) < count:
                raise ended_early(self.engine, count - len(taken))
            return self._on_batches(taken, iterator)
        # Without data on all ranks the epoch ends, as in Keras; on this one alone that shows at its end.
        self.lockstep.did_not_run(count - len(taken))
        if not taken:
            raise StopIteration
        with train_function.steps_per_execution_set_to(self.model, len(taken)):
            return self.function(train_function.iterator_over(taken, iterator))


def ended_early(engine: Engine, missing: int) -> BackendError:
    """The error of a rank that has no data where the others train on: they would wait for it for ever."""
    return BackendError(
        f"rank {engine.rank}'s data ended {missing} batches before the end of the epoch that all ranks "
        "agreed on; give fit the right steps_per_epoch"
    )


def stopped_alone(engine: Engine, left: int) -> BackendError:
    """Return the error of a rank that stopped within an epoch, where the others may go on and wait for it."""
    return BackendError(
        f"rank {engine.rank} stopped training {left} steps before the end of the epoch, and the others do "
        "not answer; a callback that may stop some ranks only needs OOOBackprop(lockstep='auto')"
    )
