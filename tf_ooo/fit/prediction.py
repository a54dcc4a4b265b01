"""What the step should take, from the measured seconds of its ops: fills the report's prediction."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from tf_ooo.costs.devices import device
from tf_ooo.costs.from_graph import graph_costs
from tf_ooo.costs.op_seconds import op_seconds
from tf_ooo.costs.profile import OpProfile, StepProfiler
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.report.report import Report
from tf_ooo.rewriting.result import RewriteResult

_LOG = logging.getLogger("tf_ooo")
# For the few ops that a profile does not show.
_FILL_IN = "cpu-core"


class StepPrediction:
    """Traces one step of the rewritten function once it is known which of the two is kept.

    The prediction is that of one stream that runs all ops one after the other; where TensorFlow runs
    ops side by side the step takes less.  What goes wrong here is a note in the report: training goes on.
    """

    def __init__(self, report: Report, due: bool = True) -> None:
        self.report, self.due = report, due

    def run(self, step: Callable[[], Any], result: RewriteResult | None) -> Any:
        """Runs one step, with the profiler, and returns its result."""
        self.due = False
        profiler = StepProfiler(1)
        outputs = profiler.run_anyway(step, self._not_known)
        if profiler.profile is not None and result is not None:
            self._fill(profiler.profile, result)
        return outputs

    def _fill(self, profile: OpProfile, result: RewriteResult) -> None:
        self.report.profiling_overhead_s += profile.overhead_s
        try:
            costs = measured_costs(profile, result)
        except OOOError as error:
            self._not_known(error)
            return
        self.report.costs = costs
        self.report.predicted_step_s = sum(costs.op_seconds.values())
        self.report.notes += costs.notes

    def _not_known(self, error: OOOError) -> None:
        _LOG.debug("no prediction: %s", error)
        kind = "" if isinstance(error, BackendError) else "costs are not known: "
        self.report.notes.append(f"the step's time is not predicted: {kind}{error}")


def measured_costs(profile: OpProfile, result: RewriteResult) -> CostTable:
    """The layers' costs and the ops' seconds of a rewritten step.

    Ops that the profile does not show and that no formula knows count as 0, and a note names them:
    waiting for the next batch, ops that oneDNN has merged with another.
    """
    seconds = op_seconds(result.graph_def, device(_FILL_IN), profile)
    in_graph = {name: seconds.seconds.get(name, 0.0) for name in result.training_graph.ops}
    costs = graph_costs(result.training_graph, in_graph)
    table = CostTable(costs.layers, source=seconds.source, op_seconds=in_graph)
    return dataclasses.replace(table, notes=(*seconds.notes, *costs.notes))
