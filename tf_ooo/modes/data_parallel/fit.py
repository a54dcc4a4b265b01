"""Runs ``model.fit`` on several processes: averages gradients, shares state, keeps ranks in step."""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_fits, keras_layers, nests, train_function
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.fit.mode import Training
from tf_ooo.fit.recorder import Watched
from tf_ooo.fit.timing import STEPS, Baseline, stock_steps_s, timed_run
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.engine import choose_engine
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.data_parallel.planning import ALONE, note_alone
from tf_ooo.modes.data_parallel.ranks import RanksInStep
from tf_ooo.modes.data_parallel.scheduled import ScheduledSteps
from tf_ooo.options import RankOptions
from tf_ooo.report.parts import Outcome
from tf_ooo.report.report import Report
from tf_ooo.report.summary import environment
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.flat import LARGEST
from tf_ooo.tracing.traces import trace_count

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_ONE_PROCESS = "one process: nothing to average"


@dataclass(frozen=True)
class Averaged:
    """Holds the averaging train function that is made once for a model's own."""

    stock: Callable[..., Any]
    averaging: Averaging
    function: Callable[..., Any]


class DataParallelMode:
    """Keeps ranks that train together; nothing falls back: without averaging there is no training."""

    keeps_stock = False
    compiles = False
    step_by_step: StepByStep

    def __init__(self, options: DataParallel) -> None:
        self.options = options
        self.averaged: Averaged | None = None
        self.scheduled: ScheduledSteps | None = None
        self.ranks: RanksInStep | None = None
        self._report = Report(mode="data_parallel")
        self._compiles = False

    def join(self) -> Engine:
        """Return the engine that was asked for, or the launcher's."""
        return choose_engine(self.options.engine)

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Raise BackendError for a step that cannot be averaged; a single rank averages nothing."""
        if self.join().size > 1:
            check_model(model)
        as_keras = train_function.is_compiled(model)
        self._compiles = self.options.compiles_tasks(as_keras, [home_device()])

    def prepare(self, model: keras.Model, steps: int | None) -> Training | None:
        """Begin on all ranks; one alone trains in stock order. OptionsError: eager with a named schedule."""
        engine, averaged = self.join(), self.averaged
        if engine.size == 1:
            self._report = self._new_report(model, engine)
            _LOG.info("%s", _ONE_PROCESS)
            self._report.put(Outcome(True, _ONE_PROCESS))
            return None
        stock = train_function.train_function_of(model)
        if averaged is None or averaged.stock is not stock:
            averaging = averaging_of(engine, self.options)
            function = train_function.new_train_function(model, averaging.wrap(model))
            self.averaged = averaged = Averaged(stock, averaging, function)
            self.scheduled, self._report = None, self._new_report(model, engine)
            self.step_by_step = StepByStep(function, self.options.compare, self._report)
        shared = self.options.shared()
        ranks = RanksInStep(OwnSteps(self), model, engine, averaged.averaging, self.options, shared, steps)
        together = functools.partial(self._run_batches, ranks) if self._together(model) else None
        ranks.begin(averaged.function, together)
        self.ranks = ranks
        if together is None and not _runs_eagerly(model):
            self.step_by_step.begin(ranks.execute, ranks)
            ranks.execute = self.step_by_step
        return ranks

    def describe(self) -> Report:
        if self.ranks is not None:
            self._report.change(batch_rows=self.ranks.batch_rows or self._report.batch_rows)
        return self._report

    def _run_batches(self, ranks: RanksInStep, batches: list[Any], iterator: object) -> Any:
        """Run the steps of an execution in one function; return their outputs."""
        known = self.scheduled
        if known is not None and known.ranks is not ranks:
            known.begin_fit(ranks)
        if (
            known is None
            or known.steps_of(ranks.lockstep.of_epoch) > known.steps  # it was made for shorter epochs
            or not nests.same_spec(known.functions.element_spec, ranks.element_spec)
        ):
            self.scheduled = known = ScheduledSteps(ranks, self.options, self._report, self._compiles)
        return known(batches)

    def _new_report(self, model: keras.Model, engine: Engine) -> Report:
        return Report("data_parallel", str(model.name), environment(model), ranks=engine.size)

    def _together(self, model: keras.Model) -> bool:
        """Return whether steps go into one function of ours; if not, note why."""
        if _runs_eagerly(model):
            if not self.options.may_fall_back:
                raise OptionsError(
                    f"schedule={self.options.schedule!r} cannot be applied to a model that runs eagerly: "
                    "there is no graph to order; compile it with run_eagerly=False (and without "
                    "tf.config.run_functions_eagerly), or leave schedule at 'auto'"
                )
            why_not = "run eagerly: there is no graph whose order could be changed"
            self._report.put(Outcome(fallback_reason=why_not))
            self._report.change(
                no_baseline="a step that runs eagerly has no graph that could run beside the fit"
            )
            return False
        most = min(train_function.steps_per_execution(model), self.options.unroll or LARGEST)
        if most > 1 or not self.options.may_fall_back:
            return True
        why_not = (
            "each execution is one step, so that steps cannot overlap; compile with steps_per_execution=8"
        )
        self._report.put(Outcome(fallback_reason=why_not, how_to_record="schedule='search'"))
        return False


class OwnSteps(Training):
    """Handles the work that each rank does by itself in a fit."""

    def __init__(self, mode: DataParallelMode) -> None:
        self._mode = mode

    def restore(self) -> Sequence[str]:
        """End a profile under way."""
        if self._mode.scheduled is not None:
            self._mode.scheduled.close()
        return ()

    def watched(self) -> Watched | None:
        return None if self._mode.scheduled is None else self._mode.scheduled.watched()


def _runs_eagerly(model: keras.Model) -> bool:
    return bool(model.run_eagerly) or train_function.functions_run_eagerly()


def averaging_of(engine: Engine, options: RankOptions) -> Averaging:
    """Make the averaging that the user asked for."""
    return Averaging(engine, options.op, options.compression, options.weighting)


def check_model(model: keras.Model) -> None:
    """Raise BackendError for a model whose gradients cannot be averaged."""
    if model.jit_compile is True and not train_function.keras_compiles_by_itself(model):
        raise BackendError(
            "jit_compile=True: XLA cannot communicate; compile the model with jit_compile=False"
        )
    if keras_fits.other_optimizer(model):
        raise BackendError(train_function.OTHER_OPTIMIZER)
    if unsynchronized := keras_layers.unsynchronized(model):
        raise BackendError(
            f"{unsynchronized[0]}: synchronized=True is over the replicas of a tf.distribute strategy; here "
            "each process would normalize its own rows, without a word: leave it out"
        )
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise BackendError(
            "the model was made in the scope of a tf.distribute strategy, which averages by itself; "
            "make it outside"
        )


class StepByStep:
    """Takes the place of a training's ``run``, for all fits of one model.

    The first executions of a fit are timed; then some steps of this rank alone are measured and undone.

    Args:
        function: the train function that averages, which is traced in executions.
        compare: as of the mode's options.
        report: receives the seconds.
    """

    _run: Callable[[Any], Any]
    _ranks: RanksInStep

    def __init__(self, function: Callable[[Any], Any], compare: bool | None, report: Report) -> None:
        self._function, self._compare, self._report = function, compare, report
        self._trace_s = 0.0  # the longest execution in which the function was traced

    def begin(self, run: Callable[[Any], Any], ranks: RanksInStep) -> None:
        """Begin a fit: ``run`` is one execution of all ``ranks``."""
        self._run, self._ranks = run, ranks
        self._seen, self._done = 0, bool(self._report.alone_s)
        self._steps_s: list[float] = []
        if not self._done:
            self._report.change(steps_s=[])

    def __call__(self, iterator: object) -> Any:
        """Return the outputs of one execution.  Raises what ``run`` does."""
        if self._done:
            return self._run(iterator)
        executions = self._ranks.executions_of_fit()
        # The first one traces, and one still comes when the others have been compared.
        enough = STEPS if executions is None else max(1, min(STEPS, executions - 2))
        if len(self._steps_s) >= enough:
            self._done = True
            return self._beside_alone(iterator)
        outputs, taken_s, traced = timed_run(lambda: self._run(iterator), lambda: trace_count(self._function))
        self._seen += 1
        if traced:
            self._trace_s = max(self._trace_s, taken_s)
        elif self._seen > 1:  # the first one also builds and compares the ranks' models
            self._steps_s.append(taken_s / train_function.steps_per_execution(self._ranks.model))
            self._report.change(steps_s=list(self._steps_s))
        return outputs

    def _beside_alone(self, iterator: object) -> Any:
        """Return the outputs of one execution, after steps of this rank alone with its first batch."""
        ranks, model = self._ranks, self._ranks.model
        together, left = train_function.steps_per_execution(model), ranks.lockstep.left
        batches = train_function.take(iterator, together if left is None else min(together, left))
        if not batches:
            return self._run(iterator)
        step_s, asked = statistics.median(self._steps_s), self._compare

        def run(least: int) -> list[float]:
            return stock_steps_s(model, batches[0], least, asked is True)

        baseline = Baseline(ALONE, self._report, asked, ranks.steps_of_fit(), always=True)
        try:
            alone_s = baseline.measured(run, step_s, self._trace_s)
        finally:
            ranks.forget_traces()  # of parts of the step, which do not average
        note_alone(self._report, alone_s, ranks)
        return self._run(train_function.iterator_over(batches, iterator))
