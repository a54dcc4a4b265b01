"""Runs the batches of ``fit`` in data parallel, and says that a rank waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import iterators, keras_fits, train_function
from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.lost import naming_the_lost
from tf_ooo.modes.data_parallel.lockstep import Lockstep

if TYPE_CHECKING:
    import keras


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
            taken = iterators.take(iterator, min(wanted, self.lockstep.left or wanted))
            self._prepare(taken[0] if taken else None, iterator)
        if self.lockstep.left is not None:
            count = self.lockstep.may_run(wanted)
        else:
            taken = iterators.take(iterator, wanted) if taken is None else taken
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
            return self._execute_one(iterator)
        taken = iterators.take(iterator, count) if taken is None else taken[:count]
        if self._on_batches is not None:
            if len(taken) < count:
                raise ended_early(self.engine, count - len(taken))
            return self._on_batches(taken, iterator)
        # Without data on all ranks the epoch ends, as in Keras; on this one alone that shows at its end.
        self.lockstep.did_not_run(count - len(taken))
        if not taken:
            raise StopIteration
        with train_function.steps_per_execution_set_to(self.model, len(taken)):
            return self.function(iterators.iterator_over(taken, iterator))

    def _execute_one(self, iterator: object) -> Any:
        import tensorflow as tf

        try:
            return self.function(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self.lockstep.did_not_run(1)
            raise


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
