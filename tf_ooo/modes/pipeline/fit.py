"""``model.fit`` as a pipeline: profile, plan, move the variables, run, move them back."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from contextlib import nullcontext
from typing import Any

from tf_ooo.compat import iterators, nests, train_function, versions
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.profile import MOST_STEPS, StepProfiler
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, MemoryLimitError, OOOError
from tf_ooo.fit.guard import Guard
from tf_ooo.fit.reporting import save_timeline, stays_stock
from tf_ooo.hosts.cluster import Cluster
from tf_ooo.hosts.devices import full_names, home_device, joined
from tf_ooo.modes.pipeline.checks import check_model, too_short_text
from tf_ooo.modes.pipeline.measured import check_costs, link_between, measured_costs, unknown_sizes
from tf_ooo.modes.pipeline.moved_fit import MovedFit
from tf_ooo.modes.pipeline.options import Pipeline
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import Wanted, make_plan
from tf_ooo.modes.pipeline.replicas import Replicas
from tf_ooo.modes.pipeline.reporting import fill_report, fill_report_of_graph, note_micro_batches
from tf_ooo.modes.pipeline.rewriting import PipelineRequest, plan_on
from tf_ooo.planning.choosing.plan import Plan
from tf_ooo.report.environment import environment
from tf_ooo.report.filling import fill_times
from tf_ooo.report.report import Report
from tf_ooo.rewriting.naming import named, variable_layers
from tf_ooo.rewriting.parts import is_part
from tf_ooo.rewriting.unrolled_tasks import Step
from tf_ooo.tracing import sync
from tf_ooo.tracing.micro_batches import rows_of, split_rows
from tf_ooo.tracing.optimizers import optimizers_of
from tf_ooo.tracing.renewal import renew
from tf_ooo.tracing.step import StepFunctions
from tf_ooo.tracing.variables import Moved, all_variables

_LOG = logging.getLogger("tf_ooo")
_TIMED = 100
_REPLACED = (
    "train_on_batch, or make_train_function, was called in this fit: from then on it trained in stock order, "
    "on one device; call it after the fit"
)
_NO_GRAPH = "TensorFlow handed no graph of it over"


class PipelineFit(MovedFit):
    """What the callback does in one or several ``fit`` calls of one model.

    Nothing falls back here, the model is distributed by request; but an unsupported TensorFlow trains in
    stock order.

    Attributes:
        replicas: those that this pipeline is one of; None: it is alone.
        planned_from: a step that was taken apart, and its costs.  Set before the first step from another fit
            of a model with the same names, it spares measuring.
        whole_layers: layers that take long are not divided.
    """

    options: Pipeline
    whole_layers = False

    def __init__(self, options: Pipeline, replicas: Replicas | None = None) -> None:
        super().__init__(options)
        self.replicas = replicas
        self.planned_from: tuple[Step, CostTable] | None = None
        self.planned: Plan | None = None
        self._plan: Any = None
        self._layers: dict[str, int] = {}
        self._planned_for: Any = None
        self._profiled = 0
        self._too_short = ""
        self._rows = 0  # of the largest micro-batch that is planned for
        self._step_s: deque[float] = deque(maxlen=_TIMED)

    # -- what the callback calls -----------------------------------------------------------------

    def begin(self, model: Any, params: dict[str, Any] | None = None) -> None:
        """At the start of training.

        Raises:
            BackendError: no such devices, a model that cannot be cut, or with ``strict`` an unsupported
                TensorFlow.
        """
        self.end()
        self._replaced = False
        if stays_stock(self.options, self.report, model):
            return
        versions.check_keras_backend(model)
        check_model(model, self.options.mode)
        self._target = joined(self.options.devices)
        devices = full_names(self._target, 0 if self.replicas is None else self.replicas.engine.local_rank)
        if isinstance(self._target, Cluster):
            renew(model)
        stock = train_function.train_function_of(model)
        self._model = model
        if self._planned_for is None or self._planned_for[0] is not stock or self._planned_for[1] != devices:
            self._forget(model, stock, devices)
        self.devices, self._seen = devices, 0
        of_before = (self._too_short, _REPLACED)
        self.report.notes = [note for note in self.report.notes if note not in of_before]
        train_function.install_train_function(model, self._execution, stock, before_next=self._end_replaced)
        self._guard = Guard(model, self._failed, self.settle, self.saving)
        self._uncompiled.set_aside(model)
        self._uncompiled.note_in(self.report)

    def _forget(self, model: Any, stock: Any, devices: tuple[str, ...]) -> None:
        self.report = Report(mode=self.options.mode, model=str(model.name), environment=environment(model))
        if self._planned_for is not None:
            self.planned_from = None
        self.planned, self._plan, self._planned_for = None, None, (stock, devices)

    def epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Takes note of the step times so far, and of steps that were not ours."""
        fill_times(self.report, self._step_s)
        self._note_replaced()

    def _note_replaced(self) -> None:
        if self._replaced:
            self._replaced = False
            self.report.notes.append(_REPLACED)
            _LOG.warning("%s", _REPLACED)

    def finish(self) -> None:
        """At the end of training: restores, writes the timeline.

        Raises BackendError where a worker was lost since the last step.
        """
        fill_times(self.report, self._step_s)
        self.note_too_short()
        self._note_replaced()
        lost = self._ended()
        if self.options.timeline is not None:
            save_timeline(self.report, self.options.timeline)
        if lost:
            raise self._gone(lost)

    def note_too_short(self) -> None:
        """Says it where training ends and no step has been cut."""
        if self._seen and self._moved is None:
            self._too_short = too_short_text(self._seen)
            self.report.notes.append(self._too_short)
            _LOG.warning("%s", self._too_short)

    # -- steps -----------------------------------------------------------------------------------

    def _execution(self, iterator: Any) -> Any:
        """One execution: ``steps_per_execution`` steps, or as many as there are data for."""
        guard, outputs, batches = self.guard, None, []
        try:
            batches = iterators.take(iterator, train_function.steps_per_execution(self._model))
            for batch in batches:
                outputs = self.step(batch, iterator)
        except BaseException as error:
            guard.raise_for(error)
        if not batches:
            raise StopIteration
        return outputs

    def step(self, batch: Any, iterator: Any) -> Any:
        """One step on one batch; its logs."""
        if self._plan is None and self.planned_from is not None:
            sync.build(self._model, optimizers_of(self._model), self._model.train_step, iterator)
            self._plan_from(*self.planned_from)
        if self._plan is not None and self.planned is not None:
            self._plan_for_more(batch)
        if self._moved is None and self._plan is not None:
            self._start()
        if self._plan is not None:
            return self._run(batch)
        return self._profile(batch, iterator)

    # -- profile ---------------------------------------------------------------------------------

    def _profile(self, batch: Any, iterator: Any) -> Any:
        """Steps on one device: the first traces, the next ones are profiled; then the plan is made."""
        if self._functions is None:
            sync.build(self._model, optimizers_of(self._model), self._model.train_step, iterator)
            whole = self._keep_layers_whole()
            self._request = PipelineRequest(self._model, None, home_device(), whole_layers=whole)
            self._functions = self._step_functions(self._request)
            self._profiled, self._seen = 0, 0
        functions = self._functions
        traced = functions.traced
        if self._request is not None and self._request.step is None:  # costs are of the first batch's parts
            self._rows = max(split_rows(rows_of(batch), self._microbatches))
        steps = 0 if self.options.costs is not None else min(self.options.profile_steps, MOST_STEPS)
        if self._profiled == 0 or not steps or self._seen > steps:
            outputs = functions(batch)
        else:
            self._profiler = self._profiler or StepProfiler(steps)
            outputs = self._profiler.run_anyway(lambda: functions(batch), self._not_measured)
        self._seen += 1
        if functions.traced > traced:
            self._profiled = 0 if self._profiler is None else self._profiled
        self._profiled += 1
        self._raise_failure()
        if self._seen > steps:
            nests.synchronize(outputs)
            self._make_plan()
        return outputs

    def _keep_layers_whole(self) -> bool:
        """Other replicas, or those who measured ``costs``, may have batches that are divided otherwise."""
        given = self.options.costs
        without_parts = given is not None and not any(is_part(layer.name) for layer in given.layers)
        return self.whole_layers or (without_parts if given is not None else self.replicas is not None)

    def _not_measured(self, error: OOOError) -> None:
        self.report.notes.append(f"costs are calculated from shapes, not measured: {error}")

    def _step_functions(self, request: PipelineRequest) -> StepFunctions:
        applying = nullcontext if self.replicas is None else self.replicas.applying(self._model)
        return StepFunctions(self._model, self._microbatches, request.tracing, applying)

    @property
    def _microbatches(self) -> int:
        return self.options.microbatches

    def _make_plan(self) -> None:
        """Takes the step apart, plans, and closes what was needed for it."""
        started = time.perf_counter()
        request, profiler = self._request, self._profiler
        assert request is not None  # for mypy: _profile has run
        step = request.step
        if step is None:
            raise BackendError(f"the step cannot be cut: {request.skipped or _NO_GRAPH}")
        measured = measured_costs(step, None if profiler is None else profiler.profile)
        costs = self.options.costs or self._on_devices(measured)
        if self.replicas is not None:
            costs = self.replicas.shared(self._with_link(costs))
        self._plan_from(step, costs)
        self.report.plan_seconds = time.perf_counter() - started
        request.close()
        if profiler is not None:
            profiler.close()
        self._request, self._functions, self._profiler = None, None, None

    def _plan_from(self, step: Step, costs: CostTable) -> None:
        check_costs(costs, [layer.name for layer in step.known.graph.layers])
        costs = self._with_link(costs)
        self.planned_from = (step, costs)
        self.report.costs = costs
        self._layers = variable_layers(step)
        self._plan_with(step, costs)

    def _plan_with(self, step: Step, costs: CostTable) -> None:
        """Sets ``_plan``, and what the report says about it."""
        limit_bytes = self.options.memory_limit_bytes
        unknown = unknown_sizes(step) if limit_bytes is not None else ()
        if limit_bytes is not None and unknown:
            raise MemoryLimitError(limit_bytes, None, unknown)
        wanted = Wanted(
            schedule=self.options.schedule,
            devices=len(self.devices),
            microbatches=step.count,
            link=costs.link,
            memory_limit_bytes=limit_bytes,
            options=self.options.policy_options,
        )
        planned = make_plan(costs.layers, units_of(len(costs.layers), step.known.glued), wanted)
        self.planned = planned
        self._plan = plan_on(self.devices, planned, step.known)
        if step.count > 1:
            note_micro_batches(self.report, self._model)
        fill_report(self.report, planned, step, costs, self.devices)

    def _plan_for_more(self, batch: Any) -> None:
        """Plans anew for a batch of more micro-batches than the last plan is for.

        With a limit of memory also for one of larger micro-batches.
        """
        assert self.planned is not None  # for mypy: there is a plan
        assert self.planned_from is not None
        parts, (step, costs) = split_rows(rows_of(batch), self._microbatches), self.planned_from
        count, known, rows = len(parts), self._rows, max(parts)
        larger = self.options.memory_limit_bytes is not None and 0 < known < rows
        if count <= self.planned.schedule.microbatches and not larger:
            return
        if larger:
            layers = tuple(layer.scaled(rows / known) for layer in costs.layers)
            costs = dataclasses.replace(costs, layers=layers)
        self._plan_with(dataclasses.replace(step, count=count), costs)
        if larger:
            self._rows, self.planned_from = rows, (step, costs)
        self._step_s.clear()
        lost = self._put_back()
        if lost:
            raise self._gone(lost)

    def _on_devices(self, costs: CostTable) -> CostTable:
        """What the layers cost where they will be, if whoever gave the devices knows."""
        told = getattr(self._target, "costs", None)
        return costs if told is None else told(costs)

    def _with_link(self, costs: CostTable) -> CostTable:
        """The costs with the link between the devices, unless they have one: then the plan is the same."""
        if costs.link != Link():
            return costs
        given = getattr(self._target, "link", None)
        return dataclasses.replace(costs, link=link_between(self.devices) if given is None else given)

    # -- pipeline --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Moves the variables; from now on steps are placed and ordered."""
        model, plan = self._model, self._plan
        assert plan is not None  # for mypy: _make_plan has run
        self._moved = Moved(model)
        variables = named(all_variables(model))
        devices = {
            id(variable): plan.device_of_stage[plan.stage_of_layer[self._layers[name]]]
            for name, variable in variables.items()
            if name in self._layers
        }
        self._moved.move(devices, variables.values())
        self._request = PipelineRequest(model, plan, dump_dir=self.options.dump_dir)
        self._functions = self._step_functions(self._request)
        self._functions.check_captures = self._moved.check_captures

    def _run(self, batch: Any) -> Any:
        functions, request = self._functions, self._request
        assert functions is not None  # for mypy: _start has run
        assert request is not None
        traced, started = functions.traced, time.perf_counter()
        outputs = functions(batch)
        if functions.traced > traced:
            nests.synchronize(outputs)
            self._raise_failure()
            if len(request.results) < functions.traced:
                raise BackendError(f"the step cannot be cut: {request.skipped or _NO_GRAPH}")
            fill_report_of_graph(self.report, request.results[0])
        else:
            nests.synchronize(outputs)
            self._step_s.append(time.perf_counter() - started)
        return outputs

    def _raise_failure(self) -> None:
        failure = None if self._request is None else self._request.failure()
        if failure is None:
            return
        if isinstance(failure, OOOError) or not isinstance(failure, Exception):
            raise failure
        raise BackendError(f"the step could not be cut: {type(failure).__name__}: {failure}") from failure
