"""Keeps the ranks of a fit in step: the same state at first, as many steps, the same logs of an epoch."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_compiled, keras_fits, keras_variables, nests, train_function
from tf_ooo.compat.train_function import Kind
from tf_ooo.errors import BackendError
from tf_ooo.fit.mode import Function, Training
from tf_ooo.fit.recorder import Watched
from tf_ooo.hosts.ranks.base import Engine, naming_the_lost
from tf_ooo.modes.data_parallel import agreement
from tf_ooo.modes.data_parallel.agreement import EpochEnds, Lockstep, ended_early, stopped_alone
from tf_ooo.options import RankOptions
from tf_ooo.tracing import variables
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.micro_batches import rows_of
from tf_ooo.tracing.traces import forget_traces

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
# A rank whose data have ended waits so long for the others, which may wait for it, before it says so.
_PATIENCE_S = 30.0
_REPLACED = (
    "train_on_batch, or make_train_function, was called in this fit: from then on gradients were not "
    "averaged, and the ranks' weights are no longer the same; go on from a checkpoint, and call it after "
    "the fit"
)


class RanksInStep(Training):
    """Represents this rank among those that train one model; its methods are called on all ranks.

    Args:
        own: the training of this rank by itself.
        options: ``lockstep``, ``stop_timeout_s``, ``weighting``.
        agreed: the options that must be equal on all ranks.
        steps: how many an epoch of this rank has, if known.

    Attributes:
        step: takes the place of the train function, from :meth:`begin` on.
        execute: runs the step; code that times executions replaces it.
        element_spec: the spec of all ranks' batches, from the first batch on.
        batch_rows: how many this rank's first batch has.
        batch: the specs of that batch's tensors; None: there is none.
    """

    step: ParallelStep
    execute: Callable[[Any], Any]

    def __init__(
        self,
        own: Training,
        model: keras.Model,
        engine: Engine,
        averaging: Averaging,
        options: RankOptions,
        agreed: Mapping[str, Any],
        steps: int | None,
    ) -> None:
        self._own = own
        self.model, self.engine, self.averaging, self.options = model, engine, averaging, options
        counts = options.lockstep == "execution"
        may_stop = options.lockstep == "auto" and keras_fits.may_stop_within_epochs()
        self.lockstep = Lockstep(engine, counts or may_stop, counts)
        self.element_spec: Any = None
        self.batch_rows: int | None = None
        self.batch: Any = None
        self._first_epoch = 0
        self._agreed = {**agreed, "epochs": keras_fits.epochs_of_fit()}
        self._steps = steps
        self._train_samples = 0.0
        self._executions_before = 0

    def steps_of_fit(self) -> int | None:
        """Return the number of steps in all epochs of the fit; None: nobody knows."""
        return self._of_fit(1)

    def executions_of_fit(self) -> int | None:
        """Return the number of executions of ``steps_per_execution`` steps in the fit; None: nobody knows."""
        return self._of_fit(train_function.steps_per_execution(self.model))

    def _of_fit(self, together: int) -> int | None:
        """Return their number; None if some rank does not know its epochs or the length of one."""
        epochs: int | None = self._agreed["epochs"]
        of_epoch = self.lockstep.of_epoch
        if epochs is None or of_epoch is None:
            return None
        return -(-of_epoch // together) * max(0, epochs - self._first_epoch)

    def begin(
        self, function: Callable[[Any], Any], on_batches: Callable[[list[Any], Any], Any] | None
    ) -> None:
        """Agree on the first epoch; ``function`` and ``on_batches`` are as of :class:`ParallelStep`."""
        known = self._steps is not None
        self.step = ParallelStep(
            function, self.engine, self.lockstep, self.model, self._share, self._verify, on_batches, known
        )
        self.execute = self.step
        self.engine.wait_for_all()
        try:
            with naming_the_lost(self.engine, "before training"):
                mine = [keras_fits.start_epoch_of(self.model), self.lockstep.asks]
                starts, asks = zip(*self.engine.gather(mine), strict=True)
        except BaseException:
            self.engine.leave()
            raise
        keras_fits.set_start_epoch(self.model, starts[0])
        self._first_epoch = starts[0] or keras_fits.argument_of_fit("initial_epoch") or 0
        self.lockstep.asks = any(asks)

    def run(self, given: Any) -> Any:
        return self.execute(given)

    def restore(self) -> Sequence[str]:
        """Leave the other ranks; forget traces that average."""
        self.engine.leave()
        lost = self._own.restore()
        self.forget_traces()
        return lost

    def explain(self, error: Exception) -> Exception:
        return self._own.explain(error)

    def evaluating(self, kind: Kind, function: Function) -> Function:
        return self._own.evaluating(kind, function)

    def watched(self) -> Watched | None:
        return self._own.watched()

    def _share(self, batch: Any, iterator: Any) -> None:
        """Prepare the first step of a ``fit``: build, compare, broadcast."""
        model, engine = self.model, self.engine
        with contextlib.suppress(BackendError):  # its tensors do not have as many
            self.batch_rows = None if batch is None else rows_of(batch)
        self.batch = nests.specs_of(batch)
        variables.build(model, variables.optimizers_of(model), model.train_step, iterator)
        forget_traces(model)
        optimizers = variables.optimizers_of(model)
        alike = agreement.batch_of(batch) if self.options.weighting == "ranks" else None
        mine = agreement.description_of(model, optimizers, self._agreed, alike)
        agreement.refuse_different([vars(theirs) for theirs in mine.told(engine)])
        self.element_spec = variables.common_spec(engine, iterator.element_spec)
        for optimizer in filter(keras_compiled.is_horovod_optimizer, optimizers):
            if not keras_compiled.horovod_averages(optimizer):
                _LOG.warning(
                    "hvd.DistributedOptimizer averages nothing with Keras 3; tf_ooo averages instead, by the "
                    "op and compression of OOOBackprop: compile with the optimizer itself"
                )
        variables.broadcast_state(engine, variables.shared_variables(model, optimizers))

    def _verify(self) -> None:
        """Check after the first step that something was averaged, and all that was updated was."""
        if not self.averaging.averaged and not self.averaging.left_alone:
            raise BackendError(
                "no gradient was averaged: train_step applies none through a Keras optimizer that is an "
                "attribute of the model; use optimizer.apply_gradients or optimizer.apply"
            )
        known = self.averaging.averaged
        weights = [w for w in self.model.trainable_weights if keras_variables.path_of(w) not in known]
        mine = [variables.checksum([weight]) for weight in weights]
        with naming_the_lost(self.engine, "after a step"):
            sums = zip(*self.engine.gather(mine), strict=True)
        parted = [
            keras_variables.path_of(w) for w, bits in zip(weights, sums, strict=True) if len(set(bits)) > 1
        ]
        if parted:
            raise BackendError(
                f"after the first step {len(parted)} weights, first {parted[0]}, are not the same on all "
                "ranks: train_step updates them by an optimizer that is no attribute of the model, or "
                "averages their gradients otherwise than over all ranks"
            )

    def epoch_begin(self, epoch: int) -> None:
        """Agree on the steps of this epoch."""
        with naming_the_lost(self.engine, "at the start of an epoch"):
            self.lockstep.begin_epoch(epoch, self._steps)
        self._executions_before = self.step.executions

    def test_begin(self) -> None:
        """Note the samples before validation, which resets the metrics."""
        self._train_samples = keras_fits.samples_seen(self.model)

    def epoch_logs(self, epoch: int, logs: dict[str, Any]) -> bool:
        """Average the logs in place, weighted by samples; check whether the ranks have drifted apart.

        False: no step ran, as some rank has no data left or has ended its training.
        """
        if self.step.executions == self._executions_before:
            self.model.stop_training = True
            text = "epoch %d does not take place: no step ran, and callbacks do not hear of it"
            _LOG.warning(text, epoch + 1)
            return False
        seen = keras_fits.samples_seen(self.model)
        validated = any(key.startswith("val_") for key in logs)
        mine = EpochEnds(
            variables.numbers_of(logs),
            train_samples=self._train_samples if validated else seen,
            test_samples=seen if validated else 0.0,
            weights=variables.checksum(self.model.trainable_weights),
        )
        replies = self._in_time(mine)
        if len(replies) == 1:
            return True
        logs.update(_averaged(replies))
        if len({reply.weights for reply in replies}) > 1:
            _LOG.warning("after epoch %d the trainable weights are not the same on all ranks", epoch + 1)
        return True

    def epoch_end(self, epoch: int) -> None:
        """Stop on all ranks if a callback has stopped one."""
        with naming_the_lost(self.engine, "at the end of an epoch"):
            self.model.stop_training = self.lockstep.stops(bool(self.model.stop_training))

    def _in_time(self, mine: EpochEnds) -> list[EpochEnds]:
        """Exchange the ranks' messages at the end of an epoch.

        If this rank ends before the agreed steps, by its data or a callback, it may be the only one: then the
        others wait for its gradients and do not answer.
        """
        missing = 0 if self.lockstep.others_ended else self.lockstep.left or 0
        answer: Future[list[EpochEnds]] = Future()

        def ask() -> list[EpochEnds]:
            with naming_the_lost(self.engine, "at the end of an epoch"):
                return self.lockstep.end_epoch(mine)

        def ask_beside() -> None:
            try:
                answer.set_result(ask())
            except Exception as error:  # raised below, by the thread that trains
                answer.set_exception(error)

        if not missing:
            return ask()
        thread = threading.Thread(target=ask_beside, daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        if thread.is_alive() and self.model.stop_training:
            # The others may have stopped as well, and be saving or validating before they say so.
            _LOG.warning("%s", stopped_alone(self.engine, missing))
            thread.join(self.options.stop_timeout_s)
        if not answer.done():
            why = stopped_alone if self.model.stop_training else ended_early
            raise why(self.engine, missing)
        replies = answer.result()
        if not self.model.stop_training:
            _LOG.warning("%s; this epoch has ended for all", ended_early(self.engine, missing))
        return replies

    def replaced(self) -> None:
        """Raise BackendError because something other than our step has trained."""
        raise BackendError(_REPLACED)

    def ended(self) -> None:
        """Tell the other ranks; callbacks may have put weights back, each rank its own."""
        self._own.ended()
        try:
            weights = variables.checksum(self.model.trainable_weights)
            alike = self.lockstep.end(weights, trained=self.step.prepared)
            if not self.lockstep.trained:
                alike = self._share_without_a_step() or alike
            if not alike:
                _LOG.warning("at the end of training the trainable weights are not the same on all ranks")
        except Exception as error:
            if not self.engine.is_lost(error):
                raise
            who = self.engine.who_ended() or "another worker ended"
            _LOG.warning("%s; that was after the last epoch: the weights hold all of its updates", who)

    def _share_without_a_step(self) -> bool:
        """If all epochs were trained before, have other ranks take over rank 0's restored state."""
        optimizers = variables.optimizers_of(self.model)
        variables.build_optimizer(self.model)
        shared = variables.shared_variables(self.model, optimizers)
        shapes = self.engine.gather([list(variable.shape) for variable in shared])
        if any(theirs != shapes[0] for theirs in shapes):
            return False
        variables.broadcast_state(self.engine, shared)
        return True

    def forget_traces(self) -> None:
        """Forget traces once a step has run, as its parts would go on averaging."""
        if self.step.prepared:
            forget_traces(self.model)


def _averaged(replies: Sequence[EpochEnds]) -> dict[str, float]:
    """Return logs of training and of validation, each weighted by its own samples."""

    def averaged(of_test: bool, samples: list[float]) -> dict[str, float]:
        logs = [{k: v for k, v in reply.logs.items() if k.startswith("val_") == of_test} for reply in replies]
        return variables.average_logs(logs, samples)

    train, test = [reply.train_samples for reply in replies], [reply.test_samples for reply in replies]
    return averaged(False, train) | averaged(True, test)


class ParallelStep:
    """Stands in the place of the train function.

    Args:
        function: the train function that averages.
        on_batches: if given, called instead of ``function`` with the batches of an execution and their
            iterator: several steps in one function must not run out of data in the middle.
        prepare: called once, with the first batch and the iterator, before the first step of a ``fit``.
        verify: called once, after that step.
        steps_known: whether ``fit`` knows how many steps an epoch has.

    Raises (from a call): whatever the step raises; StopIteration if the epoch is over for some rank (Keras 2
    would end all training if it expects more steps: it gets the last logs again without a step); BackendError
    if another rank is gone.
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
        """Run ``steps_per_execution`` steps, or as many as all ranks have data for; return the outputs."""
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
