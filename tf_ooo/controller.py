"""Runs a training step as stock or rewritten, times both, keeps the faster.

Every call runs exactly one of the two, so the training state advances once a call; their results
are the same bits, so it does not matter which one runs.  One thing forbids going to and fro: random
numbers drawn from a state that each compiled op keeps to itself (``tf.random.normal`` and friends;
Keras' own layers keep theirs in variables).  Then the first function that ran stays.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from grappler_passes import plugin
from tf_ooo import compat
from tf_ooo.inputs import Inputs
from tf_ooo.options import Options
from tf_ooo.report import Report, fill_plan
from tf_ooo.session import RewriteSession

_LOG = logging.getLogger("tf_ooo")
STOCK, REWRITTEN = "stock", "rewritten"


class StepController:
    """Callable in place of the step.

    Args:
        stock: the step as TensorFlow runs it.
        rewritten: the same step as a function of its own, not traced yet.
        session: traced functions are rewritten inside ``session.tracing()``.
        options: ``profile_steps`` steps of each are timed, alternating, after one of each that is not.
        report: filled in as things become known.
        inputs: finds the real sizes of batches, for the memory limit.

    Raises (from a call): whatever the step raises; MemoryLimitError, before the step has changed
    anything; with ``strict`` also why a rewrite failed, after the step has run.
    """

    def __init__(
        self,
        stock: Callable[..., Any],
        rewritten: Callable[..., Any],
        session: RewriteSession,
        options: Options,
        report: Report,
        inputs: Inputs | None = None,
    ) -> None:
        self.stock, self.rewritten, self.session = stock, rewritten, session
        self.options, self.report = options, report
        self.inputs = inputs or Inputs()
        self.choice: str | None = None
        self.times: dict[str, list[float]] = {STOCK: [], REWRITTEN: []}
        self._position = 0
        self._random_op = ""

    @property
    def profiling(self) -> bool:
        """Whether it has not been decided yet which of the two to keep."""
        return self.choice is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        if self.choice == STOCK:
            return self.stock(*args, **kwargs)
        if self.options.memory_limit_bytes is not None:
            args = self._look_at_inputs(args, kwargs)
        if self.choice == REWRITTEN:
            outputs = self._run_rewritten(args, kwargs)
            self._check()
            return outputs
        return self._profile(args, kwargs)

    def _look_at_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        args, seen = self.inputs.look(args, kwargs)
        if seen is not None:
            self.session.prepare(seen)
        return args

    def _run_rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Every call, not only the first: another input shape makes TensorFlow trace again.
        try:
            with self.session.tracing():
                return self.rewritten(*args, **kwargs)
        except Exception:
            self.session.raise_if_refused()
            raise

    def _profile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        which, timed = self._next()
        started = time.perf_counter()
        with plugin.watching(self._look_for_random_state):
            outputs = self.stock(*args, **kwargs) if which == STOCK else self._run_rewritten(args, kwargs)
        if self.options.profile_steps:
            compat.synchronize(outputs)
        elapsed_s = time.perf_counter() - started
        self._position += 1
        if timed:
            self.times[which].append(elapsed_s)
        else:
            self.report.profiling_overhead_s += elapsed_s if which == REWRITTEN else 0.0
        if which == REWRITTEN:
            self._check()
        if self._random_op and self.choice is None:
            self._stay_with(which)
        self._decide_if_ready()
        return outputs

    def _look_for_random_state(self, func_graph: Any) -> None:
        for op in func_graph.get_operations():
            if not self._random_op and plugin.keeps_random_state(op.type):
                self._random_op = op.name

    def _stay_with(self, which: str) -> None:
        """After the first step of a function that draws from op-held random state."""
        if which == REWRITTEN:
            self._keep_rewritten()
        else:
            self._keep_stock(
                f"{self._random_op} draws random numbers from a state of its own, which the rewritten step "
                "would not share; use tf.random.stateless_* or keras.random, or name a schedule"
            )

    def _next(self) -> tuple[str, bool]:
        """What this step runs, and whether it is timed: one of each, then profile_steps of each timed.

        Which comes first is what stays if the two cannot be mixed.  With a memory limit the rewritten
        one does: if it has to be refused, nothing has changed yet.
        """
        if not self.options.profile_steps:
            return REWRITTEN, False
        stock_first = self.options.may_fall_back and self.options.memory_limit_bytes is None
        order = (STOCK, REWRITTEN) if stock_first else (REWRITTEN, STOCK)
        return order[self._position % 2], self._position >= 2

    def _check(self) -> None:
        """Takes note of new plans and failures."""
        fill_plan(self.report, self.session.result)
        reason = self._failure()
        if reason is not None and self.choice != STOCK:
            self._keep_stock(reason)
            self.session.raise_if_failed(self.options.strict)

    def _failure(self) -> str | None:
        """Why the rewritten step is (partly) the stock one; None where it is not."""
        reason = self.session.failure()
        if reason is not None or self.session.result is not None:
            return reason
        if self.session.request.calls:
            return (
                "TensorFlow ran its graph optimizers once only (meta_optimizer_iterations=ONE), steps are "
                "rewritten in the second round: leave meta_optimizer_iterations at its default, TWO"
            )
        return "TensorFlow handed no graph over: eager execution, or graph optimizers are switched off"

    def _decide_if_ready(self) -> None:
        if self.choice is not None or self._position < 2 * (1 + self.options.profile_steps):
            if not self.options.profile_steps and self.choice is None:
                self._keep_rewritten()
            return
        stock_s, rewritten_s = (statistics.median(self.times[which]) for which in (STOCK, REWRITTEN))
        noise_s = max(map(_spread_s, self.times.values()))
        self.report.stock_step_s, self.report.measured_step_s = stock_s, rewritten_s
        self.report.step_noise_s = noise_s
        if self.options.may_fall_back and rewritten_s >= stock_s - noise_s:
            self._keep_stock(
                f"measured {rewritten_s * 1e3:.2f} ms a step against {stock_s * 1e3:.2f} ms in stock order, "
                f"noise {noise_s * 1e3:.2f} ms"
            )
        else:
            self._keep_rewritten()

    def _keep_rewritten(self) -> None:
        self.choice = REWRITTEN
        self.report.fell_back, self.report.fallback_reason = False, ""
        _LOG.info("keeping the rewritten step: %s", self.report.one_line())

    def _keep_stock(self, reason: str) -> None:
        self.choice = STOCK
        # The plug-in has logged its first error already.
        fall_back(self.report, reason, logged=self.session.error is not None)


def _spread_s(times_s: Sequence[float]) -> float:
    """Median distance from the median: one slow step does not count."""
    middle_s = statistics.median(times_s)
    return statistics.median(abs(time_s - middle_s) for time_s in times_s)


def fall_back(report: Report, reason: str, logged: bool = False) -> None:
    """Notes, and unless ``logged`` already logs in one line, that the stock step runs."""
    report.fell_back, report.fallback_reason, report.schedule = True, reason, "stock"
    level = logging.INFO if reason.startswith("measured") else logging.WARNING
    if not logged:
        _LOG.log(level, "keeping the stock step: %s", reason)
