"""The ways to compile a step: what XLA made of each, those that fail, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any

from tf_ooo.fit.step_times import REWRITTEN, STOCK
from tf_ooo.fit.ways import Ways
from tf_ooo.modes.compiled.captured import watched
from tf_ooo.modes.compiled.session import StreamSession, reason_of
from tf_ooo.report.report import Report
from tf_ooo.report.sections import CompiledRow
from tf_ooo.rewriting.reporting import clear_plan, fill_plan

# The stock order, with XLA's own way to run kernels side by side.
CONCURRENT = "stock with concurrent command buffers"
CONCURRENT_FLAGS = (
    "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
    "--xla_gpu_graph_min_graph_size=1",
)


class CompiledWays:
    """Several ways to compile a step, of which those that fail are left out; see :class:`Ways`.

    Args:
        session: has compiled them.
        report: is told what XLA made of them.
        several: whether there are.
    """

    def __init__(self, session: StreamSession, report: Report, several: bool) -> None:
        self._session, self._report, self._several = session, report, several
        session.several_ways = several
        self._left_out: dict[str, str] = {}
        self._stock_has_run = False

    def run_stock(self, step: Callable[[], Any], choice: str | None) -> Any:
        """The first time XLA is asked what it makes of the step, if it compiles it only now."""
        first, self._stock_has_run = not self._stock_has_run, True
        with watched() if first else nullcontext() as watch:
            outputs = step()
        if watch is not None and watch.module is not None:
            self._session.modules[STOCK] = watch.module
            self.ran(choice)
        return outputs

    def ran(self, choice: str | None) -> None:
        """What XLA made of the steps, for the report."""
        report, modules = self._report, self._session.modules
        report.compiled = {
            name: CompiledRow(**module.to_dict(), text=module.text()) for name, module in modules.items()
        }
        report.gains = self._session.gains
        said = [*self._session.said, *(f"{way}: left out: {why}" for way, why in self._left_out.items())]
        report.notes += [note for note in said if note not in report.notes]
        ours = modules.get(choice or REWRITTEN) or modules.get(REWRITTEN)
        report.predicted_peak_bytes = ours.total_bytes if ours is not None else None
        report.unknown_size_ops = 0
        if STOCK in modules:
            report.stock_predicted_peak_bytes = modules[STOCK].total_bytes

    def failed(self) -> Iterator[tuple[str, BaseException]]:
        """Those that could not be rewritten or compiled, as long as others are compared."""
        for name, error in list(self._session.failed.items()):
            if self._session.several_ways:
                yield name, error

    def left_out(self, which: str, error: BaseException) -> None:
        """For the report."""
        self._left_out[which] = reason_of(error)

    def keeps(self, which: str) -> None:
        """The report is that of the way that is kept."""
        self._session.shown = which
        self._report.way = which if self._several else ""
        if which == CONCURRENT:
            clear_plan(self._report)
            self._report.schedule = CONCURRENT
        else:
            fill_plan(self._report, self._session.result)

    def why_stock(self, reason: str, left: Collection[str]) -> str:
        """The reason, with the first error if no way is left, and the share of kernels in CUDA graphs."""
        self._report.way = ""
        none_left = self._left_out and not set(left) - {STOCK, CONCURRENT}
        if none_left and self._session.failures.first is None:
            reason = f"{next(iter(self._left_out.values()))}; {CONCURRENT}: {reason}"
        modules = [self._session.modules.get(name) for name in (STOCK, REWRITTEN)]
        shares = [None if module is None else module.share_in_graphs for module in modules]
        if shares[0] is not None and shares[1] is not None and shares[1] < shares[0]:
            reason += (
                f"; of its kernels {shares[1]:.0%} are in CUDA graphs, of the stock step's {shares[0]:.0%}"
            )
        return reason

    def ways(self) -> Ways:
        """The profiler sees XLA's kernels, not ops."""
        session = self._session
        return Ways(
            self.run_stock, self.ran, self.failed, self.left_out, session.give_up, self.keeps, self.why_stock,
            session.end_comparison, shows_ops=False,
        )  # fmt: skip
