"""What the step takes on one device, as Keras trains it: measured beside a fit over several, and undone."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import nests, tf_functions, train_function
from tf_ooo.report.report import Report
from tf_ooo.rewriting.failures import in_one_line
from tf_ooo.tracing.traces import random_state_in
from tf_ooo.tracing.undone import Undone

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
# The least for an interval that says something.
STEPS = 5
ONE_DEVICE = "one device"
# Of what is left of the fit.
MOST = 0.05


class Baseline:
    """Whether, and what, one device's steps are measured.

    Args:
        asked: ``compare=`` of the user: always, never, or (None) where the fit is long enough to pay for it.
        steps: of the fit, that are left; None: nobody knows.
    """

    def __init__(self, name: str, report: Report, asked: bool | None, steps: int | None) -> None:
        self.name, self._report, self._asked, self._steps = name, report, asked, steps

    def measure(self, model: keras.Model, batch: Any, trace_s: float, step_s: float) -> None:
        """Fills in the report's baseline, or why there is none.

        ``trace_s``, ``step_s``: about what it takes to trace a step, and what a step of the fit takes.
        """
        if self.name in self._report.baselines_s:
            return
        reason = self._why_not(trace_s, step_s)
        if not reason:
            started = time.perf_counter()
            reason = self._measured(model, batch)
            self._report.profiling_overhead_s += time.perf_counter() - started
        self._report.no_baseline = reason

    def _why_not(self, trace_s: float, step_s: float) -> str:
        if self._asked is None and self._steps is None:
            return f"nobody knows how long the fit is; compare=True measures {self.name} beside it"
        cost_s = trace_s + (1 + STEPS) * step_s
        if self._asked is False:
            return "compare=False"
        if self._asked is None and cost_s > MOST * (self._steps or 0) * step_s:
            measuring = f"to measure {self.name} beside it, about {cost_s:.1f} s"
            return f"the fit is too short {measuring}; compare=True does"
        return ""

    def _measured(self, model: keras.Model, batch: Any) -> str:
        """Why it could not be; empty where it was."""
        try:
            self._report.baselines_s[self.name] = stock_steps_s(model, batch)
        except tf.errors.ResourceExhaustedError:
            return f"the model does not fit on {self.name}"
        except Exception as error:  # of a step that trains nothing
            _LOG.debug("no baseline", exc_info=True)
            return in_one_line(error)
        return ""


def stock_steps_s(model: keras.Model, batch: Any) -> list[float]:
    """Seconds of single stock steps on this batch; all variables are put back.

    Raises whatever the step raises; ValueError for one that keeps random numbers to itself.
    """
    train_step = tf_functions.undecorated(model.train_step)
    undone = Undone(train_function.step_on_data(model, train_step), batch)
    draws = random_state_in(undone.concrete.graph.as_graph_def())
    if draws:
        raise ValueError(f"{draws}, which steps beside the fit would move on")
    seconds = []
    with undone:
        nests.synchronize(undone(batch))  # TensorFlow optimizes the graph
        for _ in range(STEPS):
            started = time.perf_counter()
            nests.synchronize(undone(batch))
            seconds.append(time.perf_counter() - started)
    return seconds
