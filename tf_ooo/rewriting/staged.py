"""Rewrites steps of a pipeline as TensorFlow hands them over: run layer by layer, or placed and ordered."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import graph_pb2

from grappler_passes import plugin
from grappler_passes.compat import graph_protos
from grappler_passes.passes.base import Pass
from grappler_passes.passes.plain_assigns import SUFFIX, PlainAssignsPass
from grappler_passes.passes.repeat import repeats
from grappler_passes.passes.rewrite_plan import RewritePlan
from tf_ooo.compat import func_graphs, keras_fits, keras_variables
from tf_ooo.errors import OptionsError, ScheduleError
from tf_ooo.hosts.devices import available_devices
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.model.task import replica_of_part
from tf_ooo.rewriting import passes
from tf_ooo.rewriting.compile_tasks import CompileTasksPass
from tf_ooo.rewriting.compiled_calls import as_compiled
from tf_ooo.rewriting.lowering import LaneOrder
from tf_ooo.rewriting.ordering import lane_tasks, ops_of_tasks, order_lane, order_updates, too_late
from tf_ooo.rewriting.parts import LEAST_SHARE
from tf_ooo.rewriting.placing import (
    Homes,
    crossing,
    far_slices,
    one_pipeline,
    place,
    read_by_updates,
    read_once,
    reads_elsewhere,
)
from tf_ooo.rewriting.request import RewriteRequest
from tf_ooo.rewriting.result import CompiledTasks, RewriteResult, as_function, told
from tf_ooo.rewriting.step_graph import Known, StepGraph, is_unrolled, take_apart
from tf_ooo.rewriting.task_calls import keys_of
from tf_ooo.tracing.variables import all_variables
from tf_ooo.units import Places

if TYPE_CHECKING:
    import keras

    from grappler_passes.plugin.requests import VariableInfo

_LOG = logging.getLogger("tf_ooo")
NO_GRAPH = (
    "TensorFlow handed no graph of it over: its own graph optimizers failed, as its log says (they do where "
    "tf.nn.ctc_loss was traced with two batch sizes: its functions of the first are taken for both); use "
    "microbatches=1, or one device"
)
_JOIN = "tf_ooo_join"
# A step raises these errors if its layers cannot give what a user asked for.
REFUSING = (OptionsError, ScheduleError)


@dataclass(frozen=True)
class StagedPlan:
    """Holds what a step is rewritten to: a schedule whose stages are groups of layers; every replica of
    ``homes`` runs it with its share of the micro-batches.

    ``known`` are the ops of the step that was planned, ``available`` are all existing devices.  Layers of
    ``recompute`` run their forward again before their dO. With ``compile_tasks`` XLA compiles each task.
    """

    schedule: Schedule
    known: Known
    homes: Homes
    available: tuple[str, ...]
    recompute: tuple[int, ...] = ()
    compile_tasks: bool = False


def serial_plan(step: StepGraph, device: str, available: tuple[str, ...]) -> StagedPlan:
    """Return a plan that runs one layer after the other on one device, to measure each undisturbed."""
    layers = range(len(step.graph.layers))
    tasks: list[Task] = []
    for number in range(step.count):
        tasks += [Task("F", layer, number) for layer in layers]
        for layer in reversed(layers):
            tasks += [Task("dO", layer, number), Task("dW", layer, number)]
    schedule = Schedule("pipeline", "serial", {(0, 0): TaskList(tasks)}, microbatches=step.count)
    return StagedPlan(schedule, step.known, one_pipeline(layers, [device] * len(layers)), available)


def rewrite_step(
    graph_def: graph_pb2.GraphDef, plan: StagedPlan, dump_dir: passes.Folder = None
) -> RewriteResult:
    """Place all ops on their stages' devices and order each device's tasks; XLA compiles none yet.

    If tasks are to be compiled, the result keeps the step.  Raises GraphError if the graph is not the step
    that was planned, PassError if a pass fails.
    """
    step, by_ops = take_apart(graph_def, plan.known), dataclasses.replace(plan, compile_tasks=False)
    result = rewrite_taken(step, by_ops, dump_dir)
    return dataclasses.replace(result, step=step if plan.compile_tasks else None)


def rewrite_taken(
    step: StepGraph, plan: StagedPlan, dump_dir: passes.Folder = None, refused: Set[str] = frozenset()
) -> RewriteResult:
    """Do as :func:`rewrite_step`, for a step that is already taken apart; raises PassError.

    ``refused`` are ops that XLA is known not to compile, with the other ops of their tasks.
    """
    started, homes = time.perf_counter(), plan.homes
    merges = homes.replicas > 1 or (step.count > 1 and reads_elsewhere(step, homes))
    stands_for = read_once(step, homes.replica_of_node(step)) if merges else {}
    if not plan.compile_tasks:  # its tasks would wait for each other
        stands_for |= read_by_updates(step, homes)
    changes = passes.changing(step, plan.recompute, dump_dir)
    if changes.passes:
        graph_def = changes(step.graph_def).graph_def
        step = step.after(graph_def, repeats(graph_def))
    before, ran = step, 1 + len(changes.passes)
    shared = passes.sharing(stands_for, ran, dump_dir)(step.graph_def)
    if stands_for:
        step, ran = step.after(shared.graph_def, step.repeated), ran + 1
    rewrite, left_out = _rewrite_plan(step, plan)
    last = _compiling(step, plan, rewrite, refused) if plan.compile_tasks else []
    placing = passes.placing(rewrite, plan.available, before, shared, dump_dir, ran, last)
    done = placing(step.graph_def)
    layers, where = step.graph.layers, step.where.items()
    notes = told(
        lambda: Places({name: f"{kind} of {layers[layer].name}" for name, (kind, layer, _) in where}),
        done.notes,
    )
    return RewriteResult(
        training_graph=plan.known.graph,
        schedule=plan.schedule,
        graph_def=done.graph_def,
        moved_ops=len(rewrite.priorities),
        added_edges=_controls(done.graph_def) - _controls(step.graph_def),
        plan_seconds=time.perf_counter() - started,
        mixed=dict(plan.known.graph.mixed),
        notes=(*notes, *_unordered_notes(step, left_out)),
        compiled=CompiledTasks.of(done.notes) if plan.compile_tasks else None,
    )


def _rewrite_plan(step: StepGraph, plan: StagedPlan) -> tuple[RewritePlan, Collection[int]]:
    """Return where and in which order ops run, and the ops that :func:`crossing` leaves out of the order."""
    homes, sizes = plan.homes, step.sizes
    stages, replica_of_node = homes.stage_of_layer, homes.replica_of_node(step)
    left_out = crossing(step, replica_of_node) if homes.replicas > 1 else ()
    late, devices = too_late(step), place(step, homes, sizes, replica_of_node)
    ops = ops_of_tasks(step, stages, late.union(left_out, far_slices(step, homes, devices, replica_of_node)))
    orders: list[tuple[str, LaneOrder]] = []
    for device, name, tasks in _lanes(plan, step):
        join = f"{_JOIN}/{name}"
        lane = order_lane(step.index, tasks, ops, join, plan.schedule.fused_backward, sizes)
        orders.append((device, lane))
    orders += order_updates(step, list(map(homes.of_variables, range(len(stages)))), _JOIN, sizes).items()
    where = {name: at for name, at in step.where.items() if step.index.index[name] not in late}
    rewrite = RewritePlan(
        edges=tuple(edge for _, order in orders for edge in order.edges),
        kinds={name: kind for name, (kind, _, _) in where.items()},
        layers={name: layer for name, (_, layer, _) in where.items()},
        stages={name: stages[layer] for name, (_, layer, _) in where.items()},
        streams=dict.fromkeys(where, 0),
        priorities={name: rank for _, order in orders for name, rank in order.ranks.items()},
        devices=devices,
        joins={join: device for device, order in orders for join in order.joins},
    )
    return rewrite, left_out


def _compiling(step: StepGraph, plan: StagedPlan, rewrite: RewritePlan, refused: Set[str]) -> list[Pass]:
    """Return the passes that compile the tasks of ops that have a place in the order."""
    where = {name: at for name, at in step.where.items() if name in rewrite.kinds}
    general = {**step.general, **{f"{name}{SUFFIX}": f"{step.general[name]}{SUFFIX}" for name in where}}
    where |= {f"{name}{SUFFIX}": at for name, at in where.items()}
    stages, fused = plan.homes.stage_of_layer, plan.schedule.fused_backward
    return [PlainAssignsPass(), CompileTasksPass(keys_of(where, stages, fused), general, refused)]


def _unordered_notes(step: StepGraph, left_out: Collection[int]) -> list[str]:
    names = [step.index.names[i] for i in left_out]
    tasks = [step.where[name][:2] for name in names if name in step.where]
    layers = sorted({layer for kind, layer in tasks if kind in ("dO", "dW")})
    if not layers:
        return []
    first = step.graph.layers[layers[0]].name
    return [
        f"replicas wait for each other: {len(layers)} layers, first {first}, read a state that every "
        "micro-batch changes, and their tasks are in no order"
    ]


def _lanes(plan: StagedPlan, step: StepGraph) -> Iterator[tuple[str, str, list[Task]]]:
    """Yield for each lane of each replica its device, a name, and its tasks, turn after turn."""
    of_part = replica_of_part(step.count, plan.homes.replicas)
    turns = [turn * step.count for turn in range(max(step.turns) + 1)]
    stage_of = {lane: tasks[0].stage for (lane, _), tasks in plan.schedule.lanes.items() if tasks}
    for replica, devices in enumerate(plan.homes.devices):
        own = of_part.count(replica)
        first = of_part.index(replica) if own else 0
        for lane, tasks in lane_tasks(plan.schedule, own):
            name = f"{replica}/{lane}" if replica else str(lane)
            shifted = [
                dataclasses.replace(task, microbatch=begin + first + task.microbatch)
                for begin in turns
                for task in tasks
            ]
            yield devices[stage_of[lane]], name, shifted


def _controls(graph_def: graph_pb2.GraphDef) -> int:
    return sum(text[0] == "^" for node in graph_def.node for text in node.input)


class LayerByLayer:
    """Takes steps apart so that their layers run one after the other on one device, to be measured.

    ``step`` is the first that was taken apart; ``share`` is as in :func:`take_apart`. ``check`` is given the
    first step before it runs: if it raises an error of :data:`REFUSING` the step never runs, and if it
    returns False nothing of the step runs (``rested``).
    """

    def __init__(
        self, device: str, share: float = LEAST_SHARE, check: Callable[[StepGraph], bool] = lambda step: True
    ) -> None:
        self.step: StepGraph | None = None
        self.rested = False
        self._device, self._share, self._check = device, share, check

    def rewrite(self, graph_def: graph_pb2.GraphDef) -> RewriteResult:
        """Return the step in its serial order; GraphError if the graph is no step."""
        known = None if self.step is None else self.step.known
        step = take_apart(graph_def, known, self._share)
        plan = serial_plan(step, self._device, available_devices())
        if self.step is None:
            self.rested = not self._check(step)
            self.step = step
        if not self.rested:
            return rewrite_taken(step, plan)
        try:
            at_rest = plugin.resting(graph_def)
        except (TypeError, ValueError) as error:  # the result has no zero, so it cannot rest
            said = f"first_steps='cut': train_step returns what is no number or text: {error}"
            raise OptionsError(said) from error
        return RewriteResult(step.graph, plan.schedule, at_rest, 0, 0, 0.0)


def request_to_measure(model: keras.Model, layers: LayerByLayer) -> RewriteRequest[RewriteResult]:
    """Ask that steps run layer by layer; ``model`` names variables.  BackendError as RewriteRequest."""
    return _request(model, layers.rewrite, refuse_on=REFUSING)


def request_to_place(
    model: keras.Model, plan: StagedPlan, dump_dir: passes.Folder = None
) -> RewriteRequest[RewriteResult]:
    """Ask that steps are placed and ordered as planned.  Raises BackendError as RewriteRequest.

    XLA compiles none of them yet: TensorFlow takes no new functions from a plug-in.
    """
    return _request(model, lambda graph_def: rewrite_step(graph_def, plan, dump_dir), dump_dir)


def _request(
    model: keras.Model,
    rewrite: Callable[[graph_pb2.GraphDef], RewriteResult],
    dump_dir: passes.Folder = None,
    refuse_on: tuple[type[BaseException], ...] = (),
) -> RewriteRequest[RewriteResult]:
    def described() -> Iterator[tuple[Any, VariableInfo]]:
        """Yield handles with the names of their variables, and whether Keras trains them."""
        trainable = {id(variable) for variable in keras_fits.trained_variables(model)}
        for name, variable in keras_variables.named(all_variables(model)).items():
            if (value := keras_variables.value_of(variable)) is not None:
                yield value.handle, {"name": name, "trainable": id(variable) in trainable}

    def of_steps(graph_def: graph_pb2.GraphDef) -> RewriteResult | None:
        if not is_unrolled(graph_def):
            return None
        result = rewrite(passes.adding_up(dump_dir)(graph_def).graph_def)
        _LOG.info(
            "placed and ordered a step by %s in %.2f s: %d edges added",
            result.schedule.policy,
            result.plan_seconds,
            result.added_edges,
        )
        return result

    return RewriteRequest(
        "tf_ooo-pipeline",
        of_steps,
        lambda result, before: False,
        lambda _: NO_GRAPH,
        plugin.described_by_handle(described),
        refuse_on,
        failed="the step could not be cut",
    )


@dataclass(frozen=True)
class TracedBefore:
    """Holds a step as TensorFlow's optimizers left it on one device, and the function traced for it.

    ``signature`` is that of the batches that the function takes.
    """

    step: StepGraph
    concrete: Any
    signature: Any

    def placed(
        self, plan: StagedPlan, moved: Mapping[int, Any], dump_dir: passes.Folder = None
    ) -> tuple[Callable[[Any], Any], RewriteResult]:
        """Return a function of a batch that runs the step as planned, and the result of the rewrite.

        ``moved`` are variables that replace others, by the ``id`` of the others' handles.  Tasks that are to
        be compiled are compiled when this returns.  Raises GraphError if only another trace can tell, or XLA
        cannot compile; BackendError as :func:`tf_ooo.compat.func_graphs.captures_of`; PassError.
        """
        outside = [tensor for tensor, _ in func_graphs.captures_of(self.concrete)]
        captured = [moved[id(tensor)].handle if id(tensor) in moved else tensor for tensor in outside]
        devices = dict(enumerate(captured, len(self.concrete.graph.inputs) - len(captured)))
        graph_def = graph_protos.copy_of(self.step.graph_def)
        for node in graph_def.node:
            handle = devices.get(node.attr["index"].i) if node.op == "_Arg" else None
            if handle is not None and handle.dtype == "resource":
                node.device = handle.device
        step = dataclasses.replace(self.step, graph_def=graph_def)

        def rewritten(refused: Set[str] = frozenset()) -> RewriteResult:
            return rewrite_taken(step, plan, dump_dir, refused)

        result = as_compiled(rewritten) if plan.compile_tasks else rewritten()
        return as_function(result.graph_def, self.concrete, captured), result
