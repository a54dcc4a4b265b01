"""The plug-in request of a pipeline: looks at a step's graph, or places and orders it."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from grappler_passes import plugin
from grappler_passes.passes.annotate import AnnotatePass
from grappler_passes.passes.base import PassPipeline, relaxed_by
from grappler_passes.passes.joins import JoinsPass
from grappler_passes.passes.local_constants import LocalConstantsPass
from grappler_passes.passes.order import OrderPass
from grappler_passes.passes.placement import PlacementPass
from grappler_passes.passes.plain_sums import PlainSumsPass
from grappler_passes.passes.rewrite_plan import RewritePlan
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.compat import versions
from tf_ooo.errors import BackendError, GraphError
from tf_ooo.hosts.devices import available_devices
from tf_ooo.modes.pipeline.planning import stage_of_layer
from tf_ooo.planning.choosing import plan as choosing
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.rewriting.naming import describe
from tf_ooo.rewriting.ordering import lane_tasks, ops_of_tasks, order_lane
from tf_ooo.rewriting.placing import place
from tf_ooo.rewriting.planner import RewriteResult
from tf_ooo.rewriting.unrolled_tasks import Known, Step, is_unrolled, take_apart
from tf_ooo.tracing.variables import all_variables

_LOG = logging.getLogger("tf_ooo")
_numbers = itertools.count(1)
_JOIN = "tf_ooo_join"


@dataclass(frozen=True)
class Plan:
    """What a step's graph is rewritten to.

    Attributes:
        schedule: lanes of devices; its stages are groups of layers.
        known: the ops of the step that was planned.
        stage_of_layer: for each of its layers.
        device_of_stage: full names.
        available: all devices that exist.
    """

    schedule: Schedule
    known: Known
    stage_of_layer: Sequence[int]
    device_of_stage: Sequence[str]
    available: tuple[str, ...]


def plan_on(devices: Sequence[str], planned: choosing.Plan, known: Known) -> Plan:
    """What was planned, on devices with names."""
    return Plan(
        schedule=planned.schedule,
        known=known,
        stage_of_layer=stage_of_layer(planned.problem.bounds),
        device_of_stage=[devices[number] for number in planned.schedule.device_of_stage],
        available=available_devices(),
    )


def serial_plan(step: Step, device: str, available: tuple[str, ...]) -> Plan:
    """One layer after the other on one device, micro-batch by micro-batch: to measure them undisturbed."""
    layers = range(len(step.known.graph.layers))
    tasks: list[Task] = []
    for number in range(step.count):
        tasks += [Task("F", layer, number) for layer in layers]
        for layer in reversed(layers):
            tasks += [Task("dO", layer, number), Task("dW", layer, number)]
    schedule = Schedule("pipeline", "serial", {(0, 0): TaskList(tasks)}, microbatches=step.count)
    return Plan(schedule, step.known, layers, [device] * len(layers), available)


def rewrite_step(graph_def: Any, plan: Plan, dump_dir: Any = None) -> RewriteResult:
    """Places all ops on their stages' devices and orders each device's tasks.

    Raises:
        GraphError: the graph is not the step that was planned.
        PassError: a pass fails, or what comes out does not compute what went in.
    """
    started = time.perf_counter()
    step = take_apart(graph_def, plan.known)
    rewrite, moved = _rewrite_plan(step, plan)
    passes = [
        PlacementPass(rewrite, plan.available),
        LocalConstantsPass(),
        JoinsPass(rewrite),
        OrderPass(rewrite),
        AnnotatePass(rewrite),
    ]
    done = PassPipeline(passes, dump_dir=None if dump_dir is None else str(dump_dir))(graph_def)
    VerifyPass(graph_def, done.replaced, relaxed_by(*passes))(done.graph_def)
    return RewriteResult(
        training_graph=plan.known.graph,
        schedule=plan.schedule,
        graph_def=done.graph_def,
        moved_ops=moved,
        added_edges=_controls(done.graph_def) - _controls(graph_def),
        plan_seconds=time.perf_counter() - started,
        mixed=dict(plan.known.graph.mixed),
        notes=tuple(str(note) for note in done.notes),
    )


def _rewrite_plan(step: Step, plan: Plan) -> tuple[RewritePlan, int]:
    stages = plan.stage_of_layer
    sizes = step.sizes
    devices = place(step, [plan.device_of_stage[stage] for stage in stages], sizes)
    reach = step.index.ancestor_bits(step.index.order, {})
    ops = ops_of_tasks(step, stages, reach)
    edges: list[tuple[str, str]] = []
    joins: dict[str, str] = {}
    ranks: dict[str, int] = {}
    device_of_lane = lane_devices(plan.schedule, plan.device_of_stage)
    for device, tasks in lane_tasks(plan.schedule, step.count):
        name, fused = f"{_JOIN}/{device}", plan.schedule.fused_backward
        lane = order_lane(step.index, tasks, ops, reach, name, fused, sizes)
        edges += lane.edges
        joins.update(dict.fromkeys(lane.joins, device_of_lane[device]))
        ranks.update(lane.ranks)
    where = step.where
    rewrite = RewritePlan(
        edges=tuple(edges),
        kinds={name: kind for name, (kind, _, _) in where.items()},
        layers={name: layer for name, (_, layer, _) in where.items()},
        stages={name: stages[layer] for name, (_, layer, _) in where.items()},
        streams=dict.fromkeys(where, 0),
        priorities=ranks,
        devices=devices,
        joins=joins,
    )
    return rewrite, len(ranks)


def lane_devices(schedule: Schedule, device_of_stage: Sequence[str]) -> dict[int, str]:
    """The name of each numbered device of a schedule."""
    return {
        device: device_of_stage[task.stage]
        for (device, _), tasks in schedule.lanes.items()
        for task in itertools.islice(tasks, 1)
    }


def _controls(graph_def: Any) -> int:
    return sum(text[0] == "^" for node in graph_def.node for text in node.input)


class PipelineRequest:
    """Graphs of steps that are traced inside :meth:`tracing`.

    Args:
        model: names its variables.
        plan: None: steps are taken apart and run layer by layer on ``device``.
        device: full name.
        dump_dir: folder for the graph after every pass.
        whole_layers: those that take long are not divided.

    Attributes:
        step: the first step that was taken apart.
        results: what was done, one for each step that was traced.
        skipped: why a graph is no step.

    Raises:
        BackendError: unsupported TensorFlow, or the plug-in cannot be loaded.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan | None,
        device: str = "",
        dump_dir: Any = None,
        whole_layers: bool = False,
    ) -> None:
        versions.check_versions()
        try:
            plugin.load()
        except plugin.PluginError as error:
            raise BackendError(str(error)) from error
        self.step: Step | None = None
        self._device, self._whole_layers = device, whole_layers
        self.skipped = ""
        self.results: list[RewriteResult] = []
        me = weakref.ref(self)
        describe_variables = describe(model, lambda: all_variables(model))

        def rewrite(graph_def: Any) -> Any:
            owner = me()
            return (
                None
                if owner is None or not is_unrolled(graph_def)
                else owner._take_step(graph_def, plan, dump_dir)
            )

        self.request = plugin.Request(
            f"tf_ooo-pipeline-{next(_numbers)}", rewrite, describe=describe_variables
        )
        plugin.register(self.request)
        self._close = weakref.finalize(self, plugin.unregister, self.request.id)

    def _take_step(self, graph_def: Any, plan: Plan | None, dump_dir: Any) -> Any:
        try:
            return self._take(graph_def, plan, dump_dir)
        except GraphError as error:  # branches and bodies of loops are optimized beside the step
            self.skipped = self.skipped or str(error)
            return None

    def _take(self, graph_def: Any, plan: Plan | None, dump_dir: Any) -> Any:
        graph_def = PlainSumsPass()(graph_def).graph_def
        if plan is None:
            known = None if self.step is None else self.step.known
            step = take_apart(graph_def, known, self._whole_layers)
            self.step = self.step or step
            plan = serial_plan(step, self._device, available_devices())
        result = rewrite_step(graph_def, plan, dump_dir)
        self.results.append(result)
        _LOG.info(
            "placed and ordered a step by %s in %.2f s: %d edges added",
            result.schedule.policy,
            result.plan_seconds,
            result.added_edges,
        )
        return result.graph_def

    def tracing(self) -> AbstractContextManager[Any]:
        """Functions traced on this thread inside the block belong to this request."""
        return plugin.tracing(self.request)

    def failure(self) -> BaseException | None:
        """The first error of a rewrite."""
        return self.request.errors[0] if self.request.errors else None

    def close(self) -> None:
        """Stops; what was compiled stays as it is."""
        self._close()
