"""Runs the life of a fit, the same in every mode: it begins, runs and ends, whatever ends it.

The states, and who calls what, are in ``docs/design/house.md``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.compat import releases
from tf_ooo.compat import train_function, versions
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit import timing
from tf_ooo.fit.guard import Guard, in_short
from tf_ooo.fit.mode import Mode, Training
from tf_ooo.fit.recorder import Recorder
from tf_ooo.hosts.cluster import gone, lost_text
from tf_ooo.report.parts import Recorded, fall_back, save_timeline
from tf_ooo.report.report import Report
from tf_ooo.report.summary import environment
from tf_ooo.rewriting.request import in_one_line
from tf_ooo.tracing.variables import average_evaluation

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
NOTE = (
    "jit_compile=True, on a GPU Keras' own choice: XLA compiles a step for one device without communication, "
    "so the model is not compiled during this fit"
)

_OPEN_END = (
    "the data does not say how long it is: at the end of each epoch stock Keras counts a step more, which "
    "finds no batch, and this mode does not, so that optimizer.iterations, and what follows from it (bias "
    "correction, schedules), become a little other; steps_per_epoch= says how long it is"
)


@dataclass(frozen=True)
class _Running:
    """Represents a fit that has begun."""

    model: keras.Model
    training: Training
    guard: Guard
    train_function: Callable[..., Any]
    recorder: Recorder | None


class Uncompiled:
    """Sets aside ``jit_compile=True`` where Keras 3 itself chose it on a GPU, not where the user did.

    XLA would compile evaluations for one device, too.
    """

    def __init__(self) -> None:
        self._model: keras.Model | None = None
        self._optimizer: Any = None

    def set_aside(self, model: keras.Model) -> None:
        if model.jit_compile is True and train_function.keras_compiles_by_itself(model):
            model.jit_compile = False
            self._model, self._optimizer = model, model.optimizer

    def note_in(self, report: Report) -> None:
        if self._model is not None:
            report.note(NOTE)

    def put_back(self) -> None:
        """Set ``jit_compile`` back, unless the model has been compiled again."""
        model, self._model = self._model, None
        if model is not None and model.optimizer is self._optimizer and model.jit_compile is False:
            model.jit_compile = True
        self._optimizer = None


class FitLife:
    """Does the callback's work in one or several ``fit`` calls."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._rank = self._fits = 0
        self._uncompiled = Uncompiled()
        self._running: _Running | None = None
        self._replaced: Training | None = None  # and nobody has been told
        self._told = False
        self._written = ""  # the verdict that the latest decided fit has written

    def begin(self, model: keras.Model, params: dict[str, Any] | None = None) -> None:
        """Begin a fit; raise whatever the mode refuses, unless its stock step may train instead."""
        self.end()
        self._fits += 1
        self._replaced, self._told = None, False
        try:
            self._begin(model, (params or {}).get("steps"))
        except BaseException as error:
            self.end()
            keeps_stock = self.mode.keeps_stock and not self.mode.options.strict
            if not keeps_stock or not isinstance(error, Exception):
                in_short(error)
                raise
            self._keep_stock(model, str(error) if isinstance(error, OOOError) else in_one_line(error))

    def _begin(self, model: keras.Model, steps: int | None) -> None:
        ranks = self.mode.join()
        self._rank = ranks.rank
        if (reason := releases.why_unsupported()) is not None:
            if ranks.size > 1:  # in stock order they do not average, and each would have another model
                raise BackendError(f"{reason}; {ranks.size} processes would train without averaging")
            if self.mode.options.strict:
                raise BackendError(reason)
            self._keep_stock(model, reason)
            return
        versions.check_keras_backend(model)
        self.mode.check(model, steps)
        stock = train_function.train_function_of(model)  # made as the model is compiled, if it has to be made
        if not self.mode.compiles:
            self._uncompiled.set_aside(model)
        training = self.mode.prepare(model, steps)
        if training is None:
            self._uncompiled.put_back()
            return
        report = self.mode.describe()
        self._uncompiled.note_in(report)
        report.forget(_OPEN_END)  # said of a fit before
        several = train_function.steps_per_execution(model) > 1 or versions.is_of_keras_2(model)
        if steps is None and not (self.mode.keeps_stock or several):
            report.note(_OPEN_END, log=logging.WARNING)
        self._install(model, training, stock)

    def _keep_stock(self, model: keras.Model, reason: str) -> None:
        report = self.mode.describe()
        report.change(model=str(model.name), environment=environment(model))
        if self.mode.options.timeline is not None:
            report.put(Recorded(not_measured="the stock step runs, there is no plan"))
        fall_back(report, reason)

    def _install(self, model: keras.Model, training: Training, stock: Callable[..., Any]) -> None:
        failed = functools.partial(self._failed, training)
        guard = Guard(model, training, failed, self._epoch_logs, self._epoch_end)
        recorder, step, folder = None, training.run, self.mode.options.timeline
        if folder is not None and self._rank == 0:
            recorder = Recorder(step, training.watched, self.mode.describe, folder)
            step = recorder.run
        run = guard.guarded(step, StopIteration, tf.errors.OutOfRangeError)
        self._running = _Running(model, training, guard, run, recorder)
        train_function.install_train_function(model, run, stock, before_next=self._end_replaced)

    def epoch_begin(self, epoch: int) -> None:
        if self._running is not None:
            self._running.training.epoch_begin(epoch)

    def test_begin(self, model: keras.Model) -> None:
        """Begin a validation, or an evaluation outside of ``fit``."""
        if self._running is not None:
            self._running.training.test_begin()
        else:
            average_evaluation(self.mode.join(), model)

    def epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """End an epoch of this callback; where Keras calls the guard, that handles all callbacks' epochs."""
        self._say_if_replaced()
        if self._running is None or self._running.guard.sees_epochs:
            return
        if self._epoch_logs(epoch, {} if logs is None else logs):
            self._epoch_end(epoch)

    def _epoch_logs(self, epoch: int, logs: dict[str, Any]) -> bool:
        return self._running is None or self._running.training.epoch_logs(epoch, logs)

    def _epoch_end(self, epoch: int) -> None:
        if self._running is not None:
            self._running.training.epoch_end(epoch)

    def finish(self) -> None:
        """Have rank 0 write the timeline.  BackendError: a worker was lost since the last step."""
        self._say_if_replaced()
        running = self._running
        if running is not None:
            running.training.ended()
            report = self.mode.describe()
            # One device's mode says what it has gained when it decides.
            if report.mode != "single_device" and report.steps_s and self._rank == 0:
                _LOG.info("%s: %s", report.mode, report.headline)
            if running.recorder is not None:
                running.recorder.close()
        with timing.said("putting the model back as it was"):
            lost = self._restore()
        with timing.said("writing the report and its pictures"):
            self._save_timeline()
        if running is not None and lost:
            raise gone(lost, running.training.explain)

    def _save_timeline(self) -> None:
        """Write the report; one without a verdict does not replace an earlier fit's."""
        report, prefix = self.mode.describe(), ""
        if report.gain is None and self._written:
            prefix = f"fit_{self._fits}_"
            report.note(f"an earlier fit with this callback: {self._written}")
        if self.mode.options.timeline is not None and self._rank == 0:
            save_timeline(report, self.mode.options.timeline, prefix)
        if report.gain is not None:
            self._written = report.headline

    def end(self) -> None:
        """Put everything back, whatever has happened; does nothing the second time."""
        if lost := self._restore():
            _LOG.warning("%s", lost_text(lost))

    def _restore(self) -> Sequence[str]:
        """Put everything back; return the names of lost variables. It continues an interrupted call."""
        running = self._running
        if running is None:
            self._uncompiled.put_back()
            return ()
        running.guard.close()
        try:
            lost = running.training.restore()
        finally:
            self._uncompiled.put_back()
            train_function.remove_train_function(running.model)
        self._running = None
        return lost

    def _failed(self, training: Training, error: BaseException) -> BaseException:
        """End the fit, write the report so far, and return the error to be raised."""
        explained = training.explain(error) if isinstance(error, Exception) else error
        self.mode.join().say_ended(explained)
        self.end()
        self.mode.describe().note(f"this fit ended early: {in_one_line(explained)}")
        self._save_timeline()
        return explained

    def _end_replaced(self) -> None:
        """End the training before another train function is made: by the next ``fit``, or within this one."""
        running = self._running
        self.end()
        self._replaced = None if running is None else running.training

    def _say_if_replaced(self) -> None:
        running, replaced = self._running, self._replaced
        if replaced is None and running and running.model.train_function is not running.train_function:
            replaced = running.training
        if replaced is not None and not self._told:
            self._told, self._replaced = True, None
            replaced.replaced()
