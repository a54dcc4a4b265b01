"""A pipeline whose steps take turns with those of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_ooo.bench.shared.steps import StepByStep
from tf_ooo.bench.shared.workloads import Workload

if TYPE_CHECKING:
    from tf_ooo.costs.table import CostTable
    from tf_ooo.rewriting.unrolled_tasks import Step

    Measured = tuple[Step, CostTable]


class Scheduled:
    """A pipeline with one schedule.

    Args:
        workload: what it trains.
        options: of the callback.
        measured: that of another pipeline of the same workload: then this one is traced once only.
    """

    def __init__(self, workload: Workload, options: dict[str, Any], measured: Measured | None = None) -> None:
        from tf_ooo.modes.pipeline.fit import PipelineMode
        from tf_ooo.modes.pipeline.options import Pipeline

        self._mode = PipelineMode(Pipeline(**options))
        self._mode.planned_from = measured
        self.session = StepByStep(workload, self._mode)

    @property
    def measured(self) -> Measured:
        """The step that was taken apart, and the seconds of its ops; there is one after :meth:`start`."""
        if self._mode.planned_from is None:
            raise RuntimeError("call start() first")
        return self._mode.planned_from

    def start(self) -> None:
        """Runs until the model is distributed, and two steps more."""
        while self.session.report.rewritten_graph is None:
            self.step_s()
        for _ in range(2):
            self.step_s()

    def step_s(self) -> float:
        """Seconds of one step."""
        return self.session.step_s()
