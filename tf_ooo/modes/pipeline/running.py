"""The steps of a pipeline, once it is planned."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import nests
from tf_ooo.compat.evaluation import Kind, makes_its_own
from tf_ooo.errors import OOOError
from tf_ooo.fit import progress
from tf_ooo.fit.distributed import Placed, Tracing, not_cut
from tf_ooo.fit.mode import Function
from tf_ooo.fit.timing import timed_run
from tf_ooo.hosts.devices import available_devices
from tf_ooo.hosts.target import Target
from tf_ooo.modes.pipeline.evaluation import StagedEvaluation
from tf_ooo.modes.pipeline.mesh import Mesh
from tf_ooo.modes.pipeline.outputs_first import OutputsFirst
from tf_ooo.modes.pipeline.pieces import Pieces
from tf_ooo.modes.pipeline.reporting import fill_report_of_graph
from tf_ooo.planning.building.merging import stage_of_layer
from tf_ooo.report.report import Report
from tf_ooo.rewriting.homes import Homes
from tf_ooo.rewriting.naming import variable_layers
from tf_ooo.rewriting.passes import Folder
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.staged import StagedPlan, TracedBefore, request_to_place
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.tracing.step import StepFunctions

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_TIMED = 100


class PlannedPipeline:
    """Holds what was planned, on devices with names; stays for the fits of one model."""

    def __init__(self, mesh: Mesh, step: StepGraph, devices: tuple[str, ...]) -> None:
        self.mesh, planned = mesh, mesh.plan
        self.step_s, self.turns = deque[float](maxlen=_TIMED), step.turns_with_updates
        homes = homes_of(mesh, devices)
        again = planned.problem.recomputed
        self.plan = StagedPlan(planned.schedule, step.known, homes, available_devices(), again)
        self.devices = {name: homes.of_variables(layer) for name, layer in variable_layers(step).items()}


def homes_of(mesh: Mesh, devices: Sequence[str]) -> Homes:
    """Each replica has neighbouring devices, and holds a part of each stage's variables."""
    planned, each = mesh.plan, mesh.chosen.devices
    numbers = planned.schedule.device_of_stage
    on = [[devices[replica * each + number] for number in numbers] for replica in range(mesh.replicas)]
    return Homes(stage_of_layer(planned.problem.bounds), on, mesh.chosen.holders)


class RunningPipeline:
    """A model whose variables are on their stages' devices, from :meth:`begin` to :meth:`restore`.

    Attributes:
        may_plan_anew: where a step is not the one that was planned; else it is an error.
        not_planned: why the latest step is not; it ran in stock order.
    """

    def __init__(
        self,
        model: keras.Model,
        target: Target,
        pipeline: PlannedPipeline,
        make_functions: Callable[[Tracing], StepFunctions],
        report: Report,
        dump_dir: Folder,
        pieces: Pieces,
        before: TracedBefore | None,
    ) -> None:
        self._pipeline, self._report = pipeline, report
        self.may_plan_anew, self.not_planned = False, ""
        self._model, self._placed = model, Placed(model, target)
        self._request = request_to_place(model, pipeline.plan, dump_dir)
        self._functions = make_functions(self._request.tracing)
        self._functions.check_captures = self._placed.check_captures
        self._before = before
        self._said_in_report: RewriteResult | None = None  # the first batch's
        self._evaluations: dict[Kind, StagedEvaluation | OutputsFirst] = {}
        self._dump_dir, self._pieces = dump_dir, pieces
        self._devices = len({name for names in pipeline.plan.homes.devices for name in names})
        self._functions.around_traces = partial(progress.said, f"tracing the step on {self._devices} devices")

    def begin(self) -> None:
        """Moves the variables."""
        self._placed.move(self._pipeline.devices)

    @property
    def replaced(self) -> Mapping[int, Any]:
        """Return the ``replaced`` of :class:`Moved`."""
        return self._placed.replaced

    def step(self, batch: object) -> Any:
        """Return one step; its logs."""
        if self._before is not None:
            with progress.said(f"placing the step on {self._devices} devices"):
                if self._place_traced_before(batch):
                    outputs = self._functions(batch)
                    nests.synchronize(outputs)
                    return outputs
        functions, request = self._functions, self._request
        outputs, seconds, traced = timed_run(lambda: functions(batch), lambda: functions.traced)
        if not traced:
            self._pipeline.step_s.append(seconds)
            return outputs
        request.failures.raise_first()
        if request.result is None or request.count < functions.traced:
            if functions.forget_open():  # this step ran on one device, its batch's size gets its own trace
                _LOG.debug("a step of any number of rows cannot be cut: %s", request.skipped)
                return outputs
            if not self.may_plan_anew:
                raise not_cut(request)
            self.not_planned = request.skipped
            return outputs
        self._said_in_report = self._said_in_report or request.result
        fill_report_of_graph(self._report, self._said_in_report)
        return outputs

    def _place_traced_before(self, batch: object) -> bool:
        """Return whether the step that was traced before is placed now, for its first run; it is tried once.

        Batches of other sizes may come before.
        """
        before = self._before
        if before is None or nests.signature(batch) != before.signature:
            return False
        self._before = None
        try:
            function, result = before.placed(self._pipeline.plan, self._placed.replaced, self._dump_dir)
        except OOOError as error:
            _LOG.debug("the step is traced again", exc_info=error)
            return False
        self._functions.untraced[before.signature] = function
        self._said_in_report = result
        fill_report_of_graph(self._report, result)
        return True

    def evaluating(self, kind: Kind, function: Function) -> Function:
        """Return what evaluates or predicts on the stages' devices; a class's own function stays."""
        if makes_its_own(self._model, kind):
            return function
        model, report, folder = self._model, self._report, self._dump_dir
        if kind not in self._evaluations:
            self._evaluations[kind] = (
                OutputsFirst(model, report, folder, self._pieces)
                if kind == "test"
                else StagedEvaluation(model, kind, report, folder, self._pieces)
            )
        return partial(self._evaluations[kind], function)

    def restore(self) -> list[str]:
        """Puts the variables back; names those that are lost."""
        for evaluation in self._evaluations.values():
            evaluation.close()
        self._request.close()
        return self._placed.restore()
