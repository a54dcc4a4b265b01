"""A stock step at the beginning of a fit, timed as long as it is open whether the fit pays for more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from tf_ooo.compat import nests
from tf_ooo.fit.paying import StockFirst
from tf_ooo.report.report import Report
from tf_ooo.tracing import traces


def run_stock_first(first: StockFirst, stock: Callable[..., Any], run: Callable[[], Any]) -> Any:
    """The outputs of ``run``, one execution of ``stock``; ``first`` is told what it took."""
    if not first.untimed:
        outputs = run()
        first.add(None, False)
        return outputs
    before, started = traces.trace_count(stock), time.perf_counter()
    outputs = run()
    nests.synchronize(outputs)
    first.add(time.perf_counter() - started, traces.trace_count(stock) > before)
    return outputs


def note_steps(report: Report, first: StockFirst) -> None:
    """Note the seconds of the stock steps that run, for the report; they are compared with nothing.

    Where an earlier fit has measured a baseline that stays: these steps are no verdict on it.
    """
    if first.steps_s and not report.baselines_s:
        report.steps_s, report.stock_step_s = first.steps_s, statistics.median(first.steps_s)
        report.first_steps_s = []


def forget_steps(report: Report) -> None:
    """Takes back what :func:`note_steps` noted in an earlier fit: another step may run in this one."""
    if report.stock_step_s is not None and not report.baselines_s:
        report.steps_s, report.stock_step_s = [], None
