"""Times steps, says what long work is going on, and decides whether measuring pays."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
import tensorflow as tf

from grappler_passes.blocks import if_it_takes
from tf_ooo.compat import func_graphs, keras_fits, nests, tf_functions, train_function
from tf_ooo.errors import BackendError
from tf_ooo.report.report import Report
from tf_ooo.rewriting.request import in_one_line
from tf_ooo.tracing.traces import RestoringFunction, random_state_in
from tf_ooo.units import about_count, about_text

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
# The least for an interval that says something, beside three steps as they run.
STEPS = 6
# Short steps are measured for so long, to see more of the machine than a moment, but no more than these.
_SPAN_S, _MOST_STEPS = 0.5, 30
_OF_TRACE = 0.1  # what steps beside a fit that does not pay for them add to their trace
ONE_DEVICE = "one device"
_SENDS = ("Horovod", "Collective")
_CALLS_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def timed_run(
    run: Callable[[], Any], traces: Callable[[], int], wait: bool = True
) -> tuple[Any, float, bool]:
    """Run once, and wait for the outputs unless told otherwise; ``traces`` counts the traces so far.

    Returns the outputs, the seconds until they were there, and whether something was traced meanwhile.
    """
    before, started = traces(), time.perf_counter()
    outputs = run()
    if wait:
        nests.synchronize(outputs)
    return outputs, time.perf_counter() - started, traces() > before


# A fit that does not pay for a comparison gets so many steps of stock beside it, to be compared roughly.
FEW = 3
# A measurement may take this share of the rest of the fit.
MOST = 0.05
# On one CPU device TensorFlow runs whatever is ready on all cores.  `python -m benchmarks run one_cpu` with
# ten models in two orders: none was faster, twelve of twenty were surely slower, by up to a fifth.
ORDERS_MAY_GAIN_ON_CPU = False
ON_CPU = "on one CPU device the order of steps gains nothing; compare=True compares"
# Steps that are timed before it is asked, after those in which TensorFlow traces.
_TIMED = 3
# All steps of a comparison train.  A rewritten step that takes twice as long as stock shows it in six pairs,
# after one step that warms up: seven steps are lost.
_LOST_STEPS = 7


def pays(cost_s: float, step_s: float, steps: float) -> bool:
    """Return whether so many ``steps`` of ``step_s`` seconds become at most 5% longer by ``cost_s``."""
    return cost_s <= MOST * steps * step_s


@dataclass
class Budget:
    """Counts the stock steps of a fit, until a comparison begins or turns out not to pay.

    Attributes:
        ways: number of rewritten steps that are compared, each of which is traced.
        steps: how many the fit has; None: those of its executions, though an epoch's last may have fewer.
        beside_s: seconds of a comparison beyond traces and steps, such as planning.
        executions: how many the fit has; None: not known, and those that have run must pay.
        together: steps in one execution.
        trace_s: seconds of the execution that traced, in an earlier fit if there was one.
        seen: executions of this fit.
        why_not: why stock is kept in this fit; empty while that is open.
        begins: whether it is time to compare.
    """

    ways: int = 1
    executions: int | None = None
    together: int = 1
    trace_s: float = 0.0
    seen: int = 0
    why_not: str = ""
    begins: bool = False
    beside_s: float = 0.0
    steps: int | None = None
    _times_s: list[float] = field(default_factory=list)

    @property
    def untimed(self) -> bool:
        """Return whether the next execution is to be timed."""
        return len(self._times_s) < _TIMED

    @property
    def execution_s(self) -> float:
        """Return the median seconds of an execution; 0 before one was timed."""
        return statistics.median(self._times_s) if self._times_s else 0.0

    @property
    def steps_s(self) -> list[float]:
        """Return the seconds of single steps that were timed."""
        return [time_s / self.together for time_s in self._times_s]

    @property
    def cost_s(self) -> float:
        """Estimate the seconds of a comparison; the first trace tells how long another one takes."""
        trace_s = max(0.0, self.trace_s - self.execution_s)
        return self.ways * trace_s + _LOST_STEPS * self.execution_s + self.beside_s

    @property
    def waits(self) -> str:
        """Say what the fit is waiting for."""
        if not self._times_s:
            return "stock steps run first"
        return (
            f"nobody knows how many steps come: a comparison of about {about_text(self.cost_s)} begins after "
            f"{self._needed}; compare=True begins at once"
        )

    @property
    def _needed(self) -> int:
        """Return the number of steps that pay for a comparison."""
        return math.ceil(self.cost_s / (MOST * self.execution_s)) * self.together

    def add(self, seconds: float | None, traced: bool) -> None:
        """Take note of an execution; ``seconds`` if it was timed."""
        self.seen += 1
        if traced and seconds is not None:
            self.trace_s = max(self.trace_s, seconds)
        elif seconds is not None and self.untimed:
            self._times_s.append(seconds)
        if self.why_not:  # for another reason than what it costs
            return
        left = None if self.executions is None else self.executions - self.seen
        if self.untimed and (left is None or left > 0):
            return
        self.begins = pays(self.cost_s, self.execution_s, self.seen if left is None else left)
        if left is not None and not self.begins:
            self.why_not = self._too_few()

    def _too_few(self) -> str:
        count = (self.executions or 0) * self.together if self.steps is None else self.steps
        steps = f"{count} steps"
        if not self._times_s:
            return f"{steps} are too few to pay for a comparison; compare=True compares"
        each, cost = about_text(self.execution_s / self.together), about_text(self.cost_s)
        enough = about_count(self._needed + self.seen * self.together)
        return (
            f"{steps} of {each} are too few to pay for a comparison of about {cost}: about {enough} would; "
            "compare=True compares"
        )


# In six models a step in 4 and in 8 micro-batches took 5 to 20 and 9 to 23 times as long as a forward and
# backward pass that is traced alone, and a stock step 6 to 9 times. Placing took a fifth to a third of the
# step that was traced before it, and comparing rows 1.8 to 2.7 times as long as tracing the first such pass.
_WHOLE = 8.0


def micro_batches_s(pass_s: float, microbatches: int) -> float:
    """Return the seconds of a first step in micro-batches; ``pass_s``: seconds of the pass traced alone."""
    return (_WHOLE + microbatches) * pass_s


def look_s(first_pass_s: float) -> float:
    """Return the seconds of comparing rows; ``first_pass_s``: seconds of the first traced pass."""
    return 2.0 * first_pass_s


def stock_s(first_s: float, microbatches: int) -> float:
    """Return the seconds of a first stock step; ``first_s``: seconds of the one in micro-batches."""
    return first_s * _WHOLE / (_WHOLE + microbatches)


def placing_s(first_s: float) -> float:
    """Return the seconds of placing a step on several devices that was traced for one in ``first_s``."""
    return 0.25 * first_s


def pays_from(spent_s: float, one_s: float, ours_s: float | None) -> str:
    """Say from how many steps on ``spent_s`` is gained back; empty: nobody knows.

    ``spent_s``: seconds beyond those of stock.  ``one_s``: seconds of a stock step; ``ours_s``: predicted
    seconds of a step on several devices.
    """
    if ours_s is None:
        return ""
    if ours_s >= one_s:
        return "; no gain over one device is predicted"
    return f"; it pays from about {about_count(spent_s / (one_s - ours_s))} steps on"


# Shorter work is not talked of.
AFTER_S = 2.0


@contextlib.contextmanager
def said(what: str, about_s: float = 0.0, more: str = "") -> Iterator[Callable[[float], None]]:
    """Say on stderr what is going on inside the block, if that takes long; not in ``fit(verbose=0)``.

    ``about_s``: seconds that the block will take; 0: not known.  ``more`` is said behind that. Yields a
    function to call with the seconds once they are known.
    """
    verbose = keras_fits.argument_of_fit("verbose")
    if verbose in (0, None):
        yield lambda seconds: None
        return
    started, shown = time.perf_counter(), threading.Event()
    # After the first batch Keras' progress bar ends without a new line.
    line = "\n" if verbose != 2 and keras_fits.argument_of_fit("begin_step") else ""

    def begin(seconds: float = 0.0) -> None:
        if shown.is_set() and not seconds:
            return
        about = f", about {about_text(seconds)}" if seconds else ""
        click.echo(f"{'' if shown.is_set() else line}tf_ooo: {what}{about}{more} ...", err=True)
        shown.set()

    def begin_if_long(seconds: float) -> None:
        if seconds > AFTER_S:
            begin(seconds)

    begin_if_long(about_s)
    try:
        with contextlib.nullcontext() if shown.is_set() else if_it_takes(AFTER_S, begin):
            yield begin_if_long
    finally:
        if shown.is_set():
            click.echo(f"tf_ooo: {what}: {time.perf_counter() - started:.1f} s", err=True)


class Baseline:
    """Decides whether to measure steps beside a fit, which are undone, and keeps the result.

    ``asked`` is the user's ``compare=``: always, never, or (None) if the ``steps`` left in the fit (None: not
    known) pay for it.  ``always``: a fit that is too short gets a few steps even so; ``too_short`` says that
    it was.
    """

    def __init__(
        self, name: str, report: Report, asked: bool | None, steps: int | None, always: bool = False
    ) -> None:
        self.name, self._report, self._asked, self._steps = name, report, asked, steps
        self._always, self.too_short = always, False

    def measured(
        self,
        run: Callable[[int], list[float]],
        step_s: float,
        trace_s: float,
        together: int = 1,
        ours_s: float | None = None,
    ) -> list[float]:
        """Return seconds of single steps, as ``run`` measures them; none where the report says why.

        Args:
            run: measures the given number of steps, or more where they are short.
            step_s, trace_s: about the seconds of a measured step, and at most those of tracing it.
            together: steps in one call.
            ours_s: about the seconds of a step of the fit from now on; None: as long as a measured one.
        """
        call_s = together * step_s
        steps = min(max(STEPS, math.ceil(_SPAN_S / max(call_s, 1e-9))), _MOST_STEPS)
        cost_s = trace_s + (1 + steps) * call_s
        seconds: list[float] = []
        why_not = self._why_not(step_s if ours_s is None else ours_s, cost_s)
        few = 0
        if why_not and self._always and self._asked is None and FEW:
            few = max(FEW, min(_MOST_STEPS, int(_OF_TRACE * trace_s / max(call_s, 1e-9))))
        if few or not why_not:
            started, why_not = time.perf_counter(), ""
            try:
                seconds = run(few or STEPS)
            except tf.errors.ResourceExhaustedError:
                why_not = f"the model does not fit on {self.name}"
            except Exception as error:  # of steps that train nothing
                _LOG.debug("no baseline", exc_info=True)
                why_not = in_one_line(error)
            self._report.took(time.perf_counter() - started)
        self._report.change(no_baseline=why_not)
        return seconds

    def _why_not(self, step_s: float, cost_s: float) -> str:
        if self._asked is not None:
            return "" if self._asked else "compare=False"
        if self._steps is None:
            return f"nobody knows how long the fit is; compare=True measures {self.name} beside it"
        self.too_short = not pays(cost_s, step_s, self._steps)
        measuring = f"to measure {self.name} beside it, about {cost_s:.1f} s"
        return f"the fit is too short {measuring}; compare=True does" if self.too_short else ""


def stock_steps_s(model: keras.Model, batch: object, least: int, calls_python: bool) -> list[float]:
    """Return the seconds of ``least`` or more stock steps on this batch, as :func:`undone_steps_s` does."""
    step = train_function.step_on_data(model, tf_functions.undecorated(model.train_step))
    return undone_steps_s(tf_functions.concrete_function(step, [batch]), batch, least, calls_python)


def undone_steps_s(concrete: Any, batch: Any, least: int, calls_python: bool) -> list[float]:
    """Return the seconds of ``least`` or more calls of a traced function; all variables are put back.

    Raises whatever a call raises; BackendError for a function that keeps random state to itself, or
    communicates, or calls Python (unless ``calls_python`` allows it), whose effects nobody can undo.
    """
    if draws := random_state_in(concrete.graph.as_graph_def()):
        raise BackendError(f"{draws}, which steps beside the fit would move on")
    for name, kind in func_graphs.ops_reached_from(concrete.graph):
        if kind.startswith(_SENDS):
            raise BackendError(f"{name} communicates, and others may not answer")
        if kind in _CALLS_PYTHON and not calls_python:
            raise BackendError(
                f"{name} calls Python, and what that does in steps beside the fit cannot be undone; "
                "compare=True measures them all the same"
            )
    restoring, seconds = RestoringFunction(concrete), list[float]()
    with restoring:
        nests.synchronize(restoring(batch))  # TensorFlow optimizes the graph
        while len(seconds) < least or (sum(seconds) < _SPAN_S and len(seconds) < _MOST_STEPS):
            started = time.perf_counter()
            nests.synchronize(restoring(batch))
            seconds.append(time.perf_counter() - started)
    return seconds
