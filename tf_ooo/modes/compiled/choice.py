"""The controller of a compiled step: what XLA made of each way, ways that fail, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from tf_ooo.errors import GraphError, MemoryLimitError
from tf_ooo.fit.controller import StepController
from tf_ooo.fit.step_times import REWRITTEN, STOCK
from tf_ooo.modes.compiled.captured import watched
from tf_ooo.modes.compiled.session import StreamSession, reason_of
from tf_ooo.options import OneDeviceOptions
from tf_ooo.report.report import Report
from tf_ooo.report.sections import CompiledStep
from tf_ooo.rewriting.reporting import clear_plan, fill_plan

# The stock order, with XLA's own way to run kernels side by side.
CONCURRENT = "stock with concurrent command buffers"
CONCURRENT_FLAGS = (
    "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
    "--xla_gpu_graph_min_graph_size=1",
)


class CompiledController(StepController):
    """As :class:`StepController`; of several ways to compile a step those that fail are left out.

    Raises (from a call): as there; MemoryLimitError where no way stays within the limit.
    """

    session: StreamSession

    def __init__(
        self,
        stock: Callable[..., Any],
        steps: Mapping[str, Callable[..., Any]],
        session: StreamSession,
        options: OneDeviceOptions,
        report: Report,
        on_decided: Callable[[], None] | None = None,
        samples_seen: Callable[[], float] | None = None,
    ) -> None:
        others = dict(steps)
        first = others.pop(REWRITTEN)
        super().__init__(stock, first, session, options, report, None, on_decided, others, samples_seen)
        session.several_ways = self._several = bool(others)
        self.prediction.due = False  # the profiler sees XLA's kernels, not the graph's ops
        self._left_out: dict[str, str] = {}
        self._stock_has_run = False

    def _run(self, which: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if which == STOCK:
            return self._stock(args, kwargs)
        which = which or self._ours
        try:
            outputs = super()._run(which, args, kwargs)
        except MemoryLimitError as error:
            following = self._leave_out(which, error)
            if following is None:
                raise
            if self.choice == which:
                self._keep_rewritten(f"{which} needs more than memory_limit_bytes", following)
            return self._run(following, args, kwargs)
        self._fill()
        return outputs

    def _stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first time XLA is asked what it makes of the step, if it compiles it only now."""
        first, self._stock_has_run = not self._stock_has_run, True
        with watched() if first else nullcontext() as watch:
            outputs = super()._run(STOCK, args, kwargs)
        if watch is not None and watch.found is not None:
            self.session.modules[STOCK] = watch.found
            self._fill()
        return outputs

    def _check(self, which: str) -> None:
        """Ways that failed are left out, which for those of the graph ``strict`` does not allow."""
        session = self.session
        for name, error in list(session.failed.items()):
            if not session.several_ways or name not in self.steps:
                continue
            refused = self.options.strict and name == REWRITTEN and isinstance(error, GraphError)
            if self._leave_out(name, error) is None or refused:
                session.give_up()
        super()._check(which)

    def _leave_out(self, name: str, error: BaseException) -> str | None:
        """One way less; returns another that is still there, None where it was the last."""
        left = [way for way in self.steps if way not in (STOCK, name)]
        if not left:
            return None
        del self.steps[name]
        self.times.drop(name)
        self._left_out[name] = reason_of(error)
        return left[0]

    def _fill(self) -> None:
        """What XLA made of the steps, for the report."""
        report, modules = self.report, self.session.modules
        report.compiled = {
            name: CompiledStep(**module.to_dict(), text=module.text()) for name, module in modules.items()
        }
        report.gains = self.session.gains
        said = [*self.session.said, *(f"{way}: left out: {why}" for way, why in self._left_out.items())]
        report.notes += [note for note in said if note not in report.notes]
        ours = modules.get(self.choice or REWRITTEN) or modules.get(REWRITTEN)
        report.predicted_peak_bytes = ours.total_bytes if ours is not None else None
        report.unknown_size_ops = 0
        if STOCK in modules:
            report.stock_predicted_peak_bytes = modules[STOCK].total_bytes

    def _keep_rewritten(self, because: str = "", which: str | None = None) -> None:
        """The report is that of the way that is kept."""
        self.session.shown = which = which or self._ours
        self.report.way = which if self._several else ""
        if which == CONCURRENT:
            clear_plan(self.report)
            self.report.schedule = CONCURRENT
        else:
            fill_plan(self.report, self.session.result)
        super()._keep_rewritten(because, which)

    def _keep_stock(self, reason: str) -> None:
        self.report.way = ""
        if self.session.error is None and self._left_out and not self.steps.keys() - {STOCK, CONCURRENT}:
            reason = f"{next(iter(self._left_out.values()))}; {CONCURRENT}: {reason}"
        found = [self.session.modules.get(name) for name in (STOCK, REWRITTEN)]
        shares = [None if module is None else module.share_in_graphs for module in found]
        if shares[0] is not None and shares[1] is not None and shares[1] < shares[0]:
            reason += (
                f"; of its kernels {shares[1]:.0%} are in CUDA graphs, of the stock step's {shares[0]:.0%}"
            )
        super()._keep_stock(reason)

    def _decided(self) -> None:
        self.session.end_comparison()
        self._fill()
        super()._decided()
