"""The first steps of a model that is to be distributed: on one device, layer by layer, with the profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tf_ooo.compat import nests
from tf_ooo.costs.profile import MOST_STEPS, StepProfiler
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit.measured import measured_costs
from tf_ooo.hosts.target import Target
from tf_ooo.options import DeviceOptions
from tf_ooo.report.report import Report
from tf_ooo.rewriting.request import RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.staged import LayerByLayer, request_to_measure
from tf_ooo.rewriting.unrolled_tasks import Step
from tf_ooo.tracing.micro_batches import rows_of, split_rows
from tf_ooo.tracing.step import StepFunctions


class FirstSteps:
    """The first one traces, the next ones are profiled; then it is known what the layers cost.

    Args:
        model: built, with built optimizers.
        layers: takes the step apart.
        microbatches, applying: see :class:`StepFunctions`.
        options: ``profile_steps``; with ``costs`` one step does.
        report: takes notes.

    Attributes:
        seen: steps that have run.
        rows: of the largest micro-batch of the step that was taken apart.
    """

    def __init__(
        self,
        model: Any,
        layers: LayerByLayer,
        microbatches: int,
        options: DeviceOptions,
        report: Report,
        applying: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.seen = self.rows = 0
        self._layers, self._report, self._given = layers, report, options.costs
        self._request = request_to_measure(model, layers)
        self._functions = StepFunctions(model, microbatches, self._request.tracing, applying)
        self._steps = 0 if options.costs is not None else min(options.profile_steps, MOST_STEPS)
        self._profiler = StepProfiler(self._steps or 1)

    def run(self, batch: Any) -> Any:
        """One step; its logs.  Raises why the step could not be taken apart."""
        functions = self._functions
        if self._layers.step is None:  # costs are of the first batch's parts
            self.rows = max(split_rows(rows_of(batch), functions.microbatches))
        if self.seen and self._steps:
            outputs = self._profiler.run_anyway(lambda: functions(batch), self._not_measured)
        else:
            outputs = functions(batch)
        self.seen += 1
        self._request.failures.raise_first()
        if self.done:
            nests.synchronize(outputs)
        return outputs

    @property
    def done(self) -> bool:
        """Whether no more are needed."""
        return self.seen > self._steps

    def measured(self, target: Target) -> tuple[Step, CostTable]:
        """The step, taken apart, and what its layers cost on the devices of ``target``.

        Raises BackendError where no step was handed over.
        """
        step = self._layers.step
        if step is None:
            raise not_cut(self._request)
        costs = measured_costs(step, self._profiler.profile)
        return step, self._given or target.costs(costs)

    def close(self) -> None:
        """Ends them, also in the middle."""
        self._profiler.close()
        self._request.close()

    def _not_measured(self, error: OOOError) -> None:
        self._report.notes.append(f"costs are calculated from shapes, not measured: {error}")


def not_cut(request: RewriteRequest[RewriteResult]) -> BackendError:
    """The error to raise where TensorFlow has handed over no graph of a training step."""
    return BackendError(f"the step cannot be cut: {request.skipped}")
