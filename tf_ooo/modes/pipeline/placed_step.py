"""Keeps, from fit to fit, what a planned step runs with: traced functions, and variables that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import nests
from tf_ooo.compat.evaluation import Kind
from tf_ooo.fit.mode import Function
from tf_ooo.modes.pipeline.evaluation import OutputsFirst, StagedEvaluation
from tf_ooo.rewriting.request import RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.staged import request_to_place
from tf_ooo.tracing.variables import Moved, all_variables, values_of

if TYPE_CHECKING:
    from tf_ooo.modes.pipeline.plans import PlannedPipeline
    from tf_ooo.modes.pipeline.steps import PipelineSteps

Evaluation = StagedEvaluation | OutputsFirst


class PlacedStep:
    """The functions of a plan's step.  As in stock Keras, a later fit of the same model traces none again.

    Between fits the variables on the stages' devices are empty (:class:`Moved`), and nothing is registered
    with TensorFlow: what is would hold the model for ever.

    Attributes:
        said_in_report: the first batch's graph; None: none was rewritten yet.
    """

    def __init__(self, steps: PipelineSteps, pipeline: PlannedPipeline) -> None:
        model, plans = steps.model, steps.plans
        self.moved, self._read = Moved(model), values_of(all_variables(model))
        self.request = request_to_place(model, pipeline.plan, steps.options.dump_dir)
        replicas, tracing = pipeline.mesh.replicas, self.request.tracing
        self.functions = steps.functions(plans.division, replicas, steps.seen, tracing)
        self.functions.check_captures = self.moved.check_captures
        self.said_in_report: RewriteResult | None = None
        # These evaluate and predict on the stages' devices, each with the function of Keras it stands for.
        self._evaluations: dict[Kind, tuple[Function, Evaluation]] = {}

    def evaluation(self, kind: Kind, function: Function, make: Callable[[], Evaluation]) -> Evaluation:
        """Return what was made for this function; another one has to be traced, as in stock Keras.

        One that is traced already is put away in each fit, and stands for what Keras makes in its place.
        """
        function = self.moved.put_away(f"{kind}_function") or function
        before, made = self._evaluations.get(kind, (None, None))
        if made is None or before is not function:
            for request in made.requests if made else ():
                request.close()
            made = make()
            self._evaluations[kind] = function, made
        return made

    def open(self) -> None:
        """Run again after :meth:`close`."""
        for request in self._requests:
            request.open()

    def close(self) -> None:
        """End a fit."""
        for request in self._requests:
            request.close()

    @property
    def _requests(self) -> list[RewriteRequest[Any]]:
        return [self.request, *(request for _, of in self._evaluations.values() for request in of.requests)]

    def why_not(self, steps: PipelineSteps) -> str:
        """Say why a fit that begins has to trace again; empty: it may run this."""
        if not nests.are_same(self._read, values_of(all_variables(steps.model))):
            return "the model has other variables than in the fit before"
        if self.functions.division != steps.plans.division:
            return "batches are divided otherwise than in the fit before"
        return self.request.failures.reason or ""
