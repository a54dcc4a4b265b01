"""Steps that a fit over several devices or ranks is compared with: measured beside it, and undone."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import func_graphs, nests, tf_functions, train_function
from tf_ooo.errors import BackendError
from tf_ooo.fit import timing
from tf_ooo.report.report import Report
from tf_ooo.rewriting.request import in_one_line
from tf_ooo.tracing.traces import RestoringFunction, random_state_in

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


class Baseline:
    """Decides whether undone steps are measured beside a fit, and keeps what came of it.

    ``asked`` is the user's ``compare=``: always, never, or (None) where the ``steps`` that are left of the
    fit (None: nobody knows) pay for it.  ``always``: a fit that is too short gets a few steps all the same;
    ``too_short`` says that it was.
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
            run: measures so many steps, or more where they are short.
            step_s, trace_s: about what a step that is measured takes, and what tracing it does, at most.
            together: steps in one call.
            ours_s: about what a step of the fit takes from now on; None: as long.
        """
        call_s = together * step_s
        steps = min(max(STEPS, math.ceil(_SPAN_S / max(call_s, 1e-9))), _MOST_STEPS)
        cost_s = trace_s + (1 + steps) * call_s
        seconds: list[float] = []
        why_not = self._why_not(step_s if ours_s is None else ours_s, cost_s)
        few = 0
        if why_not and self._always and self._asked is None and timing.FEW:
            few = max(timing.FEW, min(_MOST_STEPS, int(_OF_TRACE * trace_s / max(call_s, 1e-9))))
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
        self.too_short = not timing.pays(cost_s, step_s, self._steps)
        measuring = f"to measure {self.name} beside it, about {cost_s:.1f} s"
        return f"the fit is too short {measuring}; compare=True does" if self.too_short else ""


def stock_steps_s(model: keras.Model, batch: object, least: int, calls_python: bool) -> list[float]:
    """Return seconds of so many single stock steps on this batch, or more, as :func:`undone_steps_s` does."""
    step = train_function.step_on_data(model, tf_functions.undecorated(model.train_step))
    return undone_steps_s(tf_functions.concrete_function(step, [batch]), batch, least, calls_python)


def undone_steps_s(concrete: Any, batch: Any, least: int, calls_python: bool) -> list[float]:
    """Seconds of so many single calls of a traced function, or more; all variables are put back.

    Raises whatever a call raises; BackendError for one that keeps random numbers to itself, or communicates,
    or ``calls_python``, unless it may: nobody can put back what Python does.
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
