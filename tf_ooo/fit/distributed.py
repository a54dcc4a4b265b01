"""Holds what fits over several devices share: checks of the model, first steps, variables that move."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_fits, keras_layers, keras_variables, nests, train_function
from tf_ooo.costs.profile import MOST_STEPS, StepProfiler
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError
from tf_ooo.fit import timing
from tf_ooo.fit.measured import measured_costs
from tf_ooo.fit.timing import ONE_DEVICE, Baseline, stock_steps_s, timed_run
from tf_ooo.hosts.cluster import Cluster, Devices, Target, target_of
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.speeds import measured_model
from tf_ooo.options import DeviceOptions
from tf_ooo.report.parts import SlowerWarning
from tf_ooo.report.report import Report
from tf_ooo.report.summary import environment
from tf_ooo.rewriting.request import RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.staged import LayerByLayer, TracedBefore, request_to_measure
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.tracing.micro_batches import rows_of
from tf_ooo.tracing.step import StepFunctions
from tf_ooo.tracing.variables import Moved, all_variables, renew

if TYPE_CHECKING:
    import keras

Tracing = Callable[[], AbstractContextManager[Any]]
_COMPILED = "jit_compile=True: XLA compiles the step for one device; compile the model with jit_compile=False"
_REPLACED = (
    "train_on_batch, or make_train_function, was called in this fit: from then on it trained in stock order, "
    "on one device; call it after the fit"
)
_ENDED = "training ended after "


class Distributed:
    """Keeps, from fit to fit, the model that a mode over several devices trains.

    ``known``: the train function and the devices of the report; None before the first fit.  ``steps``: how
    many the present fit has; None: not known.  ``step_s``: seconds of the latest steps of the running plan.
    """

    def __init__(self, mode: str) -> None:
        self.report = Report(mode=mode)
        self.target: Target = Devices(())
        self.known: tuple[Any, Sequence[str]] | None = None
        self.steps: int | None = None
        self.step_s: Sequence[float] = ()
        self.slower_warning = SlowerWarning()

    def describe(self) -> Report:
        """Return the report with the seconds of the steps so far."""
        if self.step_s:
            report, steps_s = self.report, list(self.step_s)
            median_s = statistics.median(steps_s)
            noise_s = statistics.median(abs(step_s - median_s) for step_s in steps_s)
            section = replace(report.layerpipe or report.pipeline, step_s=steps_s)
            report.change(steps_s=steps_s, measured_step_s=median_s, step_noise_s=noise_s)
            report.change(**{report.mode: section})
        return self.report

    def say_if_slower(self) -> None:
        """Say once that one device is faster, and what would be better; later steps may take it back."""
        report = self.describe()
        self.slower_warning.look(report, report.gain or report.gain_over_first)

    @property
    def stock(self) -> Callable[[Any], Any] | None:
        """Return the train function that the report is about: one device runs it."""
        return None if self.known is None else self.known[0]

    def place(self, model: keras.Model, devices: object, local_rank: int = 0) -> None:
        """Find the target before each fit; see :func:`tf_ooo.hosts.cluster.target_of`."""
        self.target = target_of(devices, local_rank)
        if isinstance(self.target, Cluster):
            renew(model)

    def begin(self, model: keras.Model, steps: int | None) -> bool:
        """Begin a fit; return whether its model or its devices are others than in the fit before.

        ``steps``: how many an epoch has.
        """
        epochs = keras_fits.epochs_of_fit()
        self.steps = None if steps is None or epochs is None else steps * epochs
        known = train_function.train_function_of(model), self.target.devices
        if other := known != self.known:
            mode, self.known = self.report.mode, known
            self.report = Report(mode=mode, model=str(model.name), environment=environment(model))
        # These notes are of the fit before, and not true of this one.
        self.report.forget(_REPLACED, *(note for note in self.report.notes if note.startswith(_ENDED)))
        return other

    def compare(
        self,
        model: keras.Model,
        batch: object,
        first: FirstSteps | OnlyTraced,
        asked: bool | None,
        serial_s: float,
        always: bool = True,
        calls_python: bool = False,
    ) -> bool:
        """Measure stock steps on one device; return whether the fit is too short; see ``compare=``.

        ``always``: a few are measured even then.  ``serial_s``: about the seconds of such a step;
        ``calls_python``: it may call Python.  The rest of the fit takes at most the planned time, and tracing
        at most as long as for the first step, most of whose micro-batches are copies.
        """
        if ONE_DEVICE in self.report.baselines_s:  # of the fit before
            return False
        steps = None if self.steps is None else self.steps - first.seen
        baseline = Baseline(ONE_DEVICE, self.report, asked, steps, always)

        def run(least: int) -> list[float]:
            about_s = timing.stock_s(first.first_s, first.microbatches) + least * serial_s
            with timing.said(f"measuring {ONE_DEVICE}, to compare with", about_s):
                return stock_steps_s(model, batch, least, calls_python)

        ours_s = min(serial_s, self.report.predicted_step_s or serial_s)
        seconds = baseline.measured(run, serial_s, first.first_s, ours_s=ours_s)
        self.report.change(
            baselines_s={ONE_DEVICE: seconds} if seconds else {}, first_steps_s=list(first.timed_s)
        )
        return baseline.too_short

    def note_too_short(self, steps: int) -> None:
        """Say why a fit of so few steps has not been distributed; with none there is nothing to say."""
        text = (
            f"{_ENDED}{steps} steps, before the model was cut: one step more than profile_steps of one fit "
            "are on one device; profile_steps=1, or costs= of an earlier run, leave most of them out"
        )
        self.report.note(text if steps else "", log=logging.WARNING)

    def note_replaced(self) -> None:
        """Say that another train function was put in: the weights are right, on one device."""
        self.report.note(_REPLACED, log=logging.WARNING)


def check_model(model: keras.Model, mode: str) -> None:
    """Raise BackendError for a model that cannot be distributed."""
    compiled = model.jit_compile is True and not train_function.keras_compiles_by_itself(model)
    reason = _COMPILED if compiled else train_function.why_not_rewritable(model)
    if reason is not None:
        raise BackendError(f"mode={mode!r}: {reason}")
    if keras_layers.made_in_strategy(model):
        raise BackendError(
            f"the model was made in the scope of a tf.distribute strategy; mode={mode!r} needs one "
            "made outside"
        )
    if stateful := keras_layers.stateful_layers(model):
        raise BackendError(
            f"mode={mode!r}: {stateful[0]} keeps the states of its rows from batch to batch (stateful=True), "
            "and batches are on their way side by side; make it with stateful=False"
        )


@dataclass(frozen=True)
class OnlyTraced:
    """Stands for the first steps of a fit that runs none on one device; tracing took ``first_s``."""

    first_s: float
    seen: int = 0
    microbatches: int = 1
    timed_s: Sequence[float] = ()


class FirstSteps:
    """Traces with the first step and measures the next ones, which tells the costs of the layers.

    The last one is profiled, and says how a step's time is divided among its ops; those before it are only
    timed, since ops take longer under the profiler.  If the last one has other rows than the first, as at the
    end of an epoch, the next one is profiled instead.  With ``options.costs`` one step is enough.

    ``rows``: those of the largest micro-batch in the step that was taken apart.  ``make_functions`` makes the
    step, given the context of its traces.  ``pass_s``: seconds of tracing one pass; 0: not traced.
    """

    def __init__(
        self,
        model: keras.Model,
        layers: LayerByLayer,
        make_functions: Callable[[Tracing], StepFunctions],
        options: DeviceOptions,
        report: Report,
        pass_s: float = 0.0,
    ) -> None:
        self.seen = self.rows = 0
        self.microbatches, self._pass_s = 1, pass_s
        self.first_s = 0.0  # the first step, which traces
        self._layers, self._report, self._given = layers, report, options.costs
        self._request = request_to_measure(model, layers)
        self._functions = make_functions(self._request.tracing)
        self._functions.note_changed = self._note_changed
        self._functions.note_drawn = self._note_drawn
        self._says_random = bool(keras_layers.random_layers(model))  # before the first step
        self._functions.note = self._warn
        self._steps = 0 if options.costs is not None else min(options.profile_steps, MOST_STEPS)
        self.timed_s: list[float] = []  # without the profiler
        self._whole_rows, self._waited = 0, False
        self._first_batch: Any = None  # its signature
        self._profiler = StepProfiler(1)

    def _note_changed(self, names: Sequence[str], guessed: Sequence[str]) -> None:
        if names:
            self._warn(
                f"each micro-batch changes {', '.join(names)}, where a stock step does so once for the "
                "batch: they, and what depends on them, become others than in stock training; "
                "microbatches=1 keeps stock's"
            )
        if guessed:
            self._warn(
                "states that are assigned once a step, by the mean or the sum of what the forward pass "
                f"assigns for each micro-batch: {', '.join(guessed)}; whether the whole batch gives the same "
                "was not compared (check_loss); microbatches=1 keeps stock's"
            )

    def _note_drawn(self, name: str) -> None:
        if name and not self._says_random:
            self._warn(
                "random numbers are drawn for each micro-batch, others than for the whole batch and the same "
                f"for all schedules (op {name}): they are as random as stock's, but other ones"
            )

    def _warn(self, text: str) -> None:
        self._report.note(text, log=logging.WARNING)

    def run(self, batch: object) -> Any:
        """Run one step; return its logs. Raises why the step could not be taken apart, or was refused."""
        functions = self._functions
        if self._layers.step is None:  # costs are of the first batch's parts
            self._whole_rows, self._first_batch = rows_of(batch), nests.signature(batch)
            self._report.change(batch_rows=self._whole_rows)
            rows = functions.division.split(self._whole_rows)
            self.rows, self.microbatches = max(rows), len(rows)
            parts = f" in {len(rows)} micro-batches" if len(rows) > 1 else ""
            text = f"tracing the step{parts}, to cut it"
            about_s = timing.micro_batches_s(self._pass_s, len(rows))
            functions.around_traces = functools.partial(timing.said, text, about_s)
        started = time.perf_counter()
        if self.seen and self._steps:
            with timing.said(f"measuring step {self.seen} of {self._steps} on one device"):
                outputs = self._measured_step(batch)
        else:
            try:
                outputs = functions(batch)
            except Exception:
                self._request.failures.raise_refused()
                raise
        self.seen += 1
        self._request.failures.raise_first()
        if self.done or not self.first_s:
            nests.synchronize(outputs)
            self.first_s = self.first_s or time.perf_counter() - started
        return outputs

    def _measured_step(self, batch: object) -> Any:
        functions, alike = self._functions, rows_of(batch) == self._whole_rows
        if self.seen == self._steps and not alike and not self._waited:
            self._steps, self._waited = self._steps + 1, True
        if self.seen == self._steps:
            not_measured = "costs are calculated from shapes, not measured"
            return self._profiler.run_anyway(
                lambda: functions(batch), lambda error: self._report.note(f"{not_measured}: {error}")
            )
        outputs, seconds, traced = timed_run(lambda: functions(batch), lambda: functions.traced)
        if alike and not traced:
            self.timed_s.append(seconds)
        return outputs

    @property
    def done(self) -> bool:
        return self.seen > self._steps

    @property
    def rested(self) -> bool:
        """Return whether the first step was taken apart, and no part of it has run."""
        return self._layers.rested

    def measured(self) -> tuple[StepGraph, CostTable]:
        """Return the step, taken apart, and its layers' costs. BackendError: no step was handed over."""
        step = self._layers.step
        if step is None:
            raise not_cut(self._request)
        if self._given is not None:
            return step, self._given
        # Without steps to measure the plan is the same every time.
        on = measured_model(home_device()) if self.rested and self._steps > 0 else None
        return step, measured_costs(step, self._profiler.profile, self.timed_s, on=on)

    def traced_before(self) -> TracedBefore | None:
        """Return the step that was taken apart, to be placed without a second trace; None: it has not run."""
        step, first = self._layers.step, self._first_batch
        concrete = self._functions.concrete_of(first)
        if step is None or concrete is None or self.rested:
            return None
        return TracedBefore(step, concrete, first)

    def close(self) -> None:
        self._profiler.close()
        self._request.close()


def not_cut(request: RewriteRequest[RewriteResult]) -> BackendError:
    """Return the error to raise where TensorFlow has handed over no graph of a training step."""
    return BackendError(f"the step cannot be cut: {request.skipped}")


class Placed:
    """Moves variables to devices and brings them back.

    :meth:`restore` may be called before :meth:`move`, and after a move that was interrupted.
    """

    def __init__(self, model: keras.Model, target: Target, moved: Moved | None = None) -> None:
        self._model, self._target, self.moved = model, target, moved or Moved(model)

    def move(self, devices: Mapping[str, str]) -> None:
        """Move each variable to the device that is given for its name in graphs; the others stay."""
        variables = keras_variables.named(all_variables(self._model))
        by_id = {id(variable): devices[name] for name, variable in variables.items() if name in devices}
        self.moved.move(by_id, variables.values())

    def restore(self) -> list[str]:
        """Bring variables back with their present values; return the names of those whose device is gone."""
        self._target.lost()  # a read from a worker that has just died would wait for ever
        return self.moved.restore(self._target.reachable)
