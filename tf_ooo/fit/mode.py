"""Defines what a fit asks of a mode, and the experiment, in phases, that every fit is.

``docs/design/house.md`` says when each method is called.  Stock steps run first, until the rest of the fit
is known to pay for more; then steps are profiled and a plan is made; stock and planned steps are compared;
one of them is kept.  Which of these phases a mode has, and what follows each, is the mode's business.  Every
step of every phase trains.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tf_ooo.compat.train_function import Kind
from tf_ooo.fit.comparison import STOCK, StepComparison, Verdict
from tf_ooo.fit.recorder import Watched
from tf_ooo.fit.timing import Budget, timed_run
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.options import ModeOptions
from tf_ooo.report.report import Report

if TYPE_CHECKING:
    import keras

Function = Callable[[Any], Any]


class Training:
    """Represents a fit of one model in a mode, or a phase of it, from its begin until ``restore``.

    The methods' defaults suit a stock step: they do nothing.
    """

    def run(self, given: Any) -> Any:
        """Run one execution, given Keras' iterator, and return its last logs.

        It has ``steps_per_execution`` steps, or as many as there are data for.  StopIteration: no data.
        """
        raise NotImplementedError

    def restore(self) -> Sequence[str]:
        """Put the model back as it was, with its new values; may be called again.

        Returns the names of variables that are lost, because their device is gone.
        """
        return ()

    def settle(self, saving: bool) -> None:
        """Finish pending work: somebody is about to see the weights, or (True) to save them."""

    def explain(self, error: Exception) -> Exception:
        """Return the exception to raise for an error that ends the fit."""
        return error

    def replaced(self) -> None:
        """Say what it means that somebody else has put another train function in, or raise."""

    def epoch_begin(self, epoch: int) -> None:
        """Take note that an epoch begins."""

    def test_begin(self) -> None:
        """Take note that validation begins, which resets the metrics."""

    def epoch_logs(self, epoch: int, logs: dict[str, Any]) -> bool:
        """Change an epoch's logs before callbacks see them; False: no step ran, callbacks are not called."""
        return True

    def epoch_end(self, epoch: int) -> None:
        """Take note that all callbacks have heard of an epoch."""

    def ended(self) -> None:
        """Take note that all epochs are through."""

    def evaluating(self, kind: Kind, function: Function) -> Function:
        """Return the function that runs in the place of Keras' for ``"test"`` or ``"predict"``."""
        return function

    def watched(self) -> Watched | None:
        """Return what a profile of the next execution would show; None while the plan does not run."""
        return None


class Mode(Protocol):
    """Represents one way to train; it stays from fit to fit.

    Attributes:
        options: the user's options.
        keeps_stock: after an error at the beginning of a fit the stock step trains, unless ``strict``.
        compiles: whether it takes a model that XLA compiles.
    """

    keeps_stock: bool
    compiles: bool

    @property
    def options(self) -> ModeOptions: ...

    def join(self) -> Engine:
        """Wait for the processes that train together, and return them."""

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Raise an OOOError for a model that cannot be trained so, before anything is changed.

        Args:
            model: compiled.
            steps: how many an epoch has, if known.
        """

    def prepare(self, model: keras.Model, steps: int | None) -> Training | None:
        """Return the training of a model; None: its stock step trains, and the report says why."""

    def describe(self) -> Report:
        """Return what was found, planned and measured so far, for the model trained last."""


class Experiment(Training):
    """Runs one phase at a time, each until it enters another; frees what later phases do not need."""

    def __init__(self, first: Training) -> None:
        self.phase = first

    def enter(self, phase: Training) -> None:
        """Continue with another phase, from the next execution on."""
        self.phase = phase

    def run(self, given: Any) -> Any:
        return self.phase.run(given)

    def restore(self) -> Sequence[str]:
        """End the present phase; the next call continues an end that was interrupted."""
        lost = self.phase.restore()
        self.phase = Training()
        return lost

    def settle(self, saving: bool) -> None:
        self.phase.settle(saving)

    def epoch_end(self, epoch: int) -> None:
        self.phase.epoch_end(epoch)

    def ended(self) -> None:
        self.phase.ended()

    def evaluating(self, kind: Kind, function: Function) -> Function:
        return self.phase.evaluating(kind, function)

    def watched(self) -> Watched | None:
        return self.phase.watched()


class Kept(Training):
    """Represents the last phase: it is decided what runs from now on."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self.step = step

    def run(self, given: Any) -> Any:
        return self.step(given)


class StockFirst(Training):
    """Runs stock steps, until it is known whether the rest of the fit pays for an experiment.

    ``stock`` runs one execution, ``traces`` says how often it was traced.  ``keep`` is called if stock stays
    in this fit, else ``begin`` enters the next phase.  Only ``comparable`` executions are timed, as long as
    most are.  ``slowest`` maps seconds, and whether something was traced, to the slowest rank's.
    """

    def __init__(
        self,
        budget: Budget,
        report: Report,
        stock: Callable[[Any], Any],
        traces: Callable[[], int],
        keep: Callable[[Budget], None],
        begin: Callable[[Budget], None],
        comparable: Callable[[Any], bool] = lambda given: True,
        slowest: Callable[[float, bool], tuple[float, bool]] = lambda seconds, traced: (seconds, traced),
    ) -> None:
        self.budget, self._report, self._stock, self._traces = budget, report, stock, traces
        self._keep, self._begin, self._comparable, self._slowest = keep, begin, comparable, slowest
        self._told = False

    def run(self, given: Any) -> Any:
        """Return the outputs of one execution of stock, after which the next phase may begin."""
        budget = self.budget
        self._keep_if_known()
        if budget.untimed and self._comparable(given):
            outputs, seconds, traced = timed_run(lambda: self._stock(given), self._traces)
            budget.add(*self._slowest(seconds, traced))
            # A baseline that an earlier fit has measured stays: these steps are no verdict on it.
            if (steps_s := budget.steps_s) and not self._report.baselines_s:
                self._report.change(
                    steps_s=steps_s, stock_step_s=statistics.median(steps_s), first_steps_s=[]
                )
        else:
            outputs = self._stock(given)
            budget.add(None, False)
        self._report.change(undecided="" if budget.why_not else budget.waits)
        self._keep_if_known()
        if budget.begins:
            self._begin(budget)
        return outputs

    def _keep_if_known(self) -> None:
        if self.budget.why_not and not self._told:
            self._told = True
            self._keep(self.budget)


@dataclass(frozen=True)
class Turn:
    """Describes one of the turns that steps take: a single step, or several ``steps`` of equal length.

    ``outputs`` are the last step's, ``seconds`` those of one step.  ``traced``: TensorFlow traced in it.
    ``kind`` is equal for steps that do equal work; only the times of ``comparable`` turns count.
    """

    outputs: Any
    seconds: float
    traced: bool
    kind: Hashable
    steps: int = 1
    comparable: bool = True


class Comparing(Training):
    """Has stock and rewritten steps take turns until it is known which is faster.

    ``take`` runs the step of a given name, ``decide`` enters the next phase.  A turn may show that there is
    nothing to compare: then ``experiment`` is in another phase.  ``beside``: seconds of other steps, which
    come with the verdict.
    """

    def __init__(
        self,
        experiment: Experiment,
        comparison: StepComparison,
        take: Callable[[str, Any], Turn],
        decide: Callable[[Verdict], None],
        beside: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._experiment, self._comparison = experiment, comparison
        self._take, self._decide, self._beside = take, decide, beside

    def run(self, given: Any) -> Any:
        """Run the step whose turn it is; return its outputs."""
        comparison = self._comparison
        which = comparison.times.next
        turn = self._take(which, given)
        counts = comparison.add(which, turn.seconds, turn.traced or not turn.comparable, turn.kind)
        if which != STOCK and turn.comparable and not counts:
            comparison.report.took(turn.steps * turn.seconds)
        if self._experiment.phase is self and (verdict := comparison.verdict(self._beside)) is not None:
            self._decide(verdict)
        return turn.outputs


def forget_steps(report: Report) -> None:
    """Take back what :class:`StockFirst` noted in an earlier fit: another step may run in this one."""
    if report.stock_step_s is not None and not report.baselines_s:
        report.change(steps_s=[], stock_step_s=None)
