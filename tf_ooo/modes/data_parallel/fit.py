"""``model.fit`` on several processes: gradients averaged, ranks in step, state shared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from grappler_passes.compat import releases
from tf_ooo.compat import (
    keras_attributes,
    keras_fits,
    keras_layers,
    keras_optimizers,
    keras_variables,
    nests,
    tf_functions,
    train_function,
    versions,
)
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.fit.reporting import save_timeline, stays_stock
from tf_ooo.fit.saving import replacing
from tf_ooo.fit.uncompiled import Uncompiled
from tf_ooo.hosts.ranks.engine import Engine, choose_engine
from tf_ooo.modes.data_parallel import agreement
from tf_ooo.modes.data_parallel.lockstep import Lockstep
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.data_parallel.parallel_step import ParallelStep, ended_early, lost, stopped_alone
from tf_ooo.modes.data_parallel.scheduled import ScheduledSteps
from tf_ooo.report.environment import environment
from tf_ooo.report.report import Report
from tf_ooo.tracing import sync
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.optimizers import optimizers_of
from tf_ooo.tracing.unrolled import LARGEST

_LOG = logging.getLogger("tf_ooo")
# How long a rank whose data have ended waits for the others, which may wait for it; and, when it has said so,
# one that a callback has stopped.
_PATIENCE_S, _STOPPED_S = 30.0, 600.0
_REPLACED = (
    "train_on_batch, or make_train_function, was called in this fit: from then on gradients were not "
    "averaged, and the ranks' weights are no longer the same; go on from a checkpoint, and call it after "
    "the fit"
)
_SAVING = ("save", "save_weights")
_ONE_PROCESS = "one process: nothing to average"


class DataParallelFit:
    """What the callback does in one or several ``fit`` calls of one model.

    Nothing falls back silently here: ranks that cannot be averaged must not train.
    """

    def __init__(self, options: DataParallel) -> None:
        self.options = options
        self._agreed = options.shared()
        self.report = Report(mode="data_parallel")
        self._uncompiled = Uncompiled()
        self.engine: Engine | None = None
        self.averaging: Averaging | None = None
        self.lockstep: Lockstep | None = None
        self.step: ParallelStep | None = None
        self._stock: Callable[..., Any] | None = None
        self._function: Callable[..., Any] | None = None
        self._scheduled: ScheduledSteps | None = None
        self._spec: Any = None
        self._model: Any = None
        self._params: dict[str, Any] = {}
        self._train_samples = 0.0
        self._replaced = False

    def begin(self, model: Any, params: dict[str, Any] | None = None) -> None:
        """At the start of training.

        Raises:
            BackendError: the engine, a step that cannot be averaged, or several ranks on an unsupported
                TensorFlow.
            OptionsError: a named schedule and a model that runs eagerly.
        """
        self.end()
        self._replaced = False
        self.engine = choose_engine(self.options.engine)
        if self.engine.size == 1:
            self._begin_alone(model)
            return
        _check_versions(self.engine.size)
        versions.check_keras_backend(model)
        _check(model)
        self._uncompiled.set_aside(model)
        self._params = params or {}
        stock = train_function.train_function_of(model)
        if self._stock is not stock:
            self._stock = stock
            self.averaging = Averaging(
                self.engine, self.options.op, self.options.compression, self.options.weighting
            )
            self._function = train_function.new_train_function(model, self.averaging.wrap(model))
            self._scheduled = None
            self.report = Report(mode="data_parallel", model=str(model.name), environment=environment(model))
        assert self._function is not None  # for mypy: set with _stock
        self._uncompiled.note_in(self.report)
        self.lockstep = Lockstep(self.engine, self.options.lockstep == "execution")
        on_batches = self._run_batches if self._together(model) else None
        known = self._params.get("steps") is not None
        self.step = ParallelStep(
            self._function, self.engine, self.lockstep, model, self._prepare, self._verify, on_batches, known
        )
        start = self._guarded(
            lambda engine: engine.gather(keras_fits.start_epoch_of(model)), "before training"
        )
        keras_fits.set_start_epoch(model, start[0])
        self._model = model
        train_function.install_train_function(model, self.step, stock, before_next=self._end_replaced)
        for name in _SAVING:  # a killed rank 0 leaves the last checkpoint, not half of the next
            keras_attributes.shadow(model, name, replacing(getattr(model, name)))

    def _begin_alone(self, model: Any) -> None:
        self.report = Report(mode="data_parallel", model=str(model.name), environment=environment(model))
        if stays_stock(self.options, self.report, model):
            return
        versions.check_keras_backend(model)
        _LOG.info("%s", _ONE_PROCESS)
        self.report.fell_back, self.report.fallback_reason = True, _ONE_PROCESS

    def _together(self, model: Any) -> bool:
        """Whether steps go into one function of ours; notes why not."""
        if _runs_eagerly(model):
            if not self.options.may_fall_back:
                raise OptionsError(
                    f"schedule={self.options.schedule!r} cannot be applied to a model that runs eagerly: "
                    "there is no graph to order; compile it with run_eagerly=False (and without "
                    "tf.config.run_functions_eagerly), or leave schedule at 'auto'"
                )
            self.report.fallback_reason = "run eagerly: there is no graph whose order could be changed"
            return False
        most = min(train_function.steps_per_execution(model), self.options.unroll or LARGEST)
        if most > 1 or not self.options.may_fall_back:
            return True
        self.report.fallback_reason = (
            "each execution is one step, so that steps cannot overlap; compile with steps_per_execution=8"
        )
        return False

    def _run_batches(self, batches: list[Any], iterator: Any) -> Any:
        assert self.averaging is not None  # for mypy: begin has run
        assert self.engine is not None
        assert self.lockstep is not None
        model, known, of_epoch = self._model, self._scheduled, self.lockstep.of_epoch
        if known is not None and known.steps_of(of_epoch) > known.steps:
            known = None  # it was made for shorter epochs
        if known is None or not nests.same_spec(known.element_spec, self._spec):
            known = ScheduledSteps(
                model, self.averaging, self._spec, self.engine, self.options, self.report, of_epoch
            )
            self._scheduled = known
        return known(batches)

    def _prepare(self, batch: Any, iterator: Any) -> None:
        """Before the first step of a ``fit``: build, compare, broadcast."""
        model, engine = self._model, self.engine
        assert engine is not None  # for mypy: begin has run
        sync.build(model, optimizers_of(model), model.train_step, iterator)
        _forget_traces(model)
        optimizers = optimizers_of(model)
        mine = agreement.description_of(model, optimizers) | {"options": self._agreed}
        if self.options.weighting == "ranks":
            mine["batch"] = agreement.batch_of(batch)
        agreement.refuse_different(engine, mine)
        self._spec = sync.common_spec(engine, iterator.element_spec)
        for optimizer in optimizers:
            horovods = keras_optimizers.is_horovod_optimizer(optimizer)
            if horovods and not keras_optimizers.horovod_averages(optimizer):
                _LOG.warning(
                    "hvd.DistributedOptimizer averages nothing with Keras 3; tf_ooo averages instead, by the "
                    "op and compression of OOOBackprop: compile with the optimizer itself"
                )
        sync.broadcast_state(engine, sync.shared_variables(model, optimizers))

    def _verify(self) -> None:
        """After the first step: something must have been averaged, and all that was updated."""
        assert self.averaging is not None  # for mypy: begin has run
        if not self.averaging.averaged and not self.averaging.left_alone:
            raise BackendError(
                "no gradient was averaged: train_step applies none through a Keras optimizer that is an "
                "attribute of the model; use optimizer.apply_gradients or optimizer.apply"
            )
        known = self.averaging.averaged
        weights = [w for w in self._model.trainable_weights if keras_variables.path_of(w) not in known]
        mine = [sync.checksum([weight]) for weight in weights]
        sums = zip(*self._guarded(lambda engine: engine.gather(mine), "after a step"), strict=True)
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
        """Agrees on the steps of this epoch."""
        if self.lockstep is not None and self._model is not None:
            lockstep, steps = self.lockstep, self._params.get("steps")
            self._guarded(lambda _: lockstep.begin_epoch(epoch, steps), "at the start of an epoch")

    def test_begin(self) -> None:
        """Before validation, which resets the metrics."""
        if self._model is not None:
            self._train_samples = keras_fits.samples_seen(self._model)

    def epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Averages the logs, in place, weighted by samples; looks whether the ranks have drifted apart.

        Raises BackendError where something else than our step has trained.
        """
        self._check_replaced()
        if self.lockstep is None or self._model is None:
            return
        lockstep, logs = self.lockstep, {} if logs is None else logs
        seen = keras_fits.samples_seen(self._model)
        validated = any(key.startswith("val_") for key in logs)
        mine = {
            "logs": {key: float(value) for key, value in logs.items() if _is_number(value)},
            "train": self._train_samples if validated else seen,
            "test": seen if validated else 0.0,
            "weights": sync.checksum(self._model.trainable_weights),
            "stop": bool(self._model.stop_training),
        }
        replies = self._in_time(lambda: lockstep.end_epoch(mine))
        if len(replies) == 1:
            return
        logs.update(_averaged(replies))
        # Another epoch would begin, and end without a step.
        self._model.stop_training = any(reply["stop"] for reply in replies)
        if len({reply["weights"] for reply in replies}) > 1:
            _LOG.warning("after epoch %d the trainable weights are not the same on all ranks", epoch + 1)

    def _in_time(self, exchange: Callable[[], Any]) -> Any:
        """What the ranks say at the end of an epoch.

        Where data end, or a callback stops, before the steps that were agreed on, this may be so for this
        rank alone: the others wait for its gradients and do not answer.
        """
        assert self.lockstep is not None  # for mypy: begin has run
        assert self.engine is not None
        missing = 0 if self.lockstep.others_ended else self.lockstep.left or 0
        ask_ranks = partial(self._guarded, lambda _: exchange(), "at the end of an epoch")
        if not missing:
            return ask_ranks()
        found: list[Any] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                found.append(ask_ranks())
            except Exception as error:  # raised below, by the thread that trains
                errors.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        if thread.is_alive() and self._model.stop_training:
            # The others may have stopped as well, and be saving or validating before they say so.
            _LOG.warning("%s", stopped_alone(self.engine, missing))
            thread.join(_STOPPED_S)
        if errors:
            raise errors[0]
        if not found:
            why = stopped_alone if self._model.stop_training else ended_early
            raise why(self.engine, missing)
        return found[0]

    def end(self) -> None:
        """Puts the model's own train function back; does nothing the second time."""
        if self._scheduled is not None:
            self._scheduled.close()
        self._uncompiled.put_back()
        if self._model is not None:
            train_function.remove_train_function(self._model)
            for name in _SAVING:
                keras_attributes.unshadow(self._model, name)
            if self.step is not None and self.step.prepared:
                _forget_traces(self._model)
            self._model = None

    def _check_replaced(self) -> None:
        if self._replaced:
            self._replaced = False
            raise BackendError(_REPLACED)

    def _end_replaced(self) -> None:
        """Before another train function is made: by the next ``fit``, or within this one."""
        self.end()
        self._replaced = True

    def finish(self) -> None:
        """At the end of training: tells the other ranks, restores; rank 0 writes the timeline."""
        self._check_replaced()
        if self._model is not None and self.lockstep is not None:
            self._say_end(self.lockstep)
        self.end()
        if self.options.timeline is not None and self.engine is not None and self.engine.rank == 0:
            save_timeline(self.report, self.options.timeline)

    def _say_end(self, lockstep: Lockstep) -> None:
        """A worker that is lost from here on takes no update with it: the script goes on, and saves."""
        assert self.engine is not None  # for mypy: begin has run
        try:
            lockstep.end()
        except Exception as error:
            if not self.engine.is_lost(error):
                raise
            _LOG.warning("another worker ended after the last epoch; the weights hold all of its updates")

    def _guarded(self, talk: Callable[[Engine], Any], where: str) -> Any:
        assert self.engine is not None  # for mypy: begin has run
        try:
            return talk(self.engine)
        except Exception as error:
            if not self.engine.is_lost(error):
                raise
            raise lost(self.engine, error, where) from error


def _forget_traces(model: Any) -> None:
    """A part of the step that is a ``tf.function`` would go on averaging, or not, as it was first traced."""
    for part in keras_layers.parts_of(model):
        tf_functions.forget_traces(part)


def _runs_eagerly(model: Any) -> bool:
    return bool(model.run_eagerly) or train_function.functions_run_eagerly()


def _check_versions(ranks: int) -> None:
    """No fallback here: ranks that train on in stock order do not average, and each has another model."""
    reason = releases.why_unsupported()
    if reason is not None:
        raise BackendError(f"{reason}; {ranks} processes would train without averaging")


def _check(model: Any) -> None:
    if model.jit_compile is True and not train_function.keras_compiles_by_itself(model):
        raise BackendError(
            "jit_compile=True: XLA cannot communicate; compile the model with jit_compile=False"
        )
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise BackendError(
            "the model was made in the scope of a tf.distribute strategy, which averages by itself; "
            "make it outside"
        )


def _averaged(replies: list[dict[str, Any]]) -> dict[str, float]:
    """Logs of training and of validation, each weighted by their own samples."""
    out: dict[str, float] = {}
    for test in (False, True):
        logs = [
            {key: value for key, value in reply["logs"].items() if key.startswith("val_") == test}
            for reply in replies
        ]
        out |= sync.average_logs(logs, [reply["test" if test else "train"] for reply in replies])
    return out


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
