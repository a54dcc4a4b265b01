"""Puts a schedule's order on every step of an unrolled graph, computation and communication; and makes the
plug-in requests by which TensorFlow hands such graphs over."""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from grappler_passes import plugin
from grappler_passes.analysis.steps import classify_steps, split_steps, steps_of
from grappler_passes.compat import graph_protos
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import PassResult
from grappler_passes.passes.steps import Additions, additions
from tf_ooo.compat import keras_fits
from tf_ooo.costs.communication import as_allreduce_bytes
from tf_ooo.costs.from_graph import places, variable_bytes
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import ScheduleError
from tf_ooo.planning.building.step_model import COMMUNICATION, COMPUTE
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.rewriting import passes
from tf_ooo.rewriting.lowering import TaskOps, first_ops, last_ops, lower, only_tasks, task_ops, tasks_of_ops
from tf_ooo.rewriting.request import ResultT, RewriteRequest
from tf_ooo.rewriting.result import RewriteResult, told
from tf_ooo.rewriting.step_graph import is_unrolled
from tf_ooo.rewriting.task_calls import TaskKey
from tf_ooo.tracing.intercepting import parts_of

if TYPE_CHECKING:
    import keras
    from tensorflow.core.framework import graph_pb2

_LOG = logging.getLogger("tf_ooo")
# So much is handed over and not through where nothing was measured.
FLIGHT_BYTES = 2 * 2**20
_REDUCES = ("HorovodAllreduce", "CollectiveReduceV2")
_GATHERS = ("HorovodAllgather", "CollectiveGatherV2")

LayerKey = tuple[int, ...]
ScheduleFor = Callable[[TrainingGraph], Schedule]
# The communication ops of each slice of each layer.
_Sent = dict[tuple[int, int], list[str]]


@dataclass(frozen=True)
class _Ordered:
    """Holds one step, its tasks, and the control inputs that its nodes have gained."""

    graph: TrainingGraph
    schedule: Schedule
    tasks: TaskOps
    gained: Additions
    notes: tuple[str, ...]


def order_steps(
    graph_def: graph_pb2.GraphDef,
    schedule_for: ScheduleFor,
    flight_bytes: float = FLIGHT_BYTES,
    planned_for: Sequence[LayerKey] | None = None,
    dump_dir: passes.Folder = None,
    with_tasks: bool = False,
) -> RewriteResult:
    """Order each step by itself, as ``schedule_for`` says for the first one, by edges within the step.

    The argument is not changed.  ``planned_for``: the layers that the schedule counts (:func:`layer_keys`);
    None: those of the first step in its order.  ``with_tasks``: the result says which op is of which task.

    Raises:
        GraphError: a step is no training step.
        ScheduleError: the schedule is not one of this graph, or the steps have different layers.
        PassError: a pass fails, or its result does not compute the same as its input.
    """
    started = time.perf_counter()
    separated = passes.separating(dump_dir)(graph_def)
    graphs = split_steps(separated.graph_def)
    classified = classify_steps(graphs)
    keys = [layer_keys(*step) for step in zip(graphs, classified, strict=True)]
    wanted = keys[0] if planned_for is None else [tuple(key) for key in planned_for]
    if any(sorted(of_step) != sorted(wanted) for of_step in keys):
        whose = "the steps of the unrolled graph" if planned_for is None else "rank 0's plan and this graph"
        raise ScheduleError(f"{whose} do not have the same layers")
    schedule = schedule_for(classified[0])
    schedules = [numbered_as(schedule, [of_step.index(key) for key in wanted]) for of_step in keys]
    steps = [
        _order(*step, flight_bytes, None if dump_dir is None else Path(dump_dir) / f"step_{number:02d}")
        for number, step in enumerate(zip(graphs, classified, schedules, strict=True))
    ]
    merge = passes.ordering_steps([step.gained for step in steps], graph_def, separated, dump_dir)
    last = steps[-1]
    return RewriteResult(
        training_graph=last.graph,
        schedule=last.schedule,
        graph_def=merge(separated.graph_def).graph_def,
        moved_ops=sum(step.tasks.moved_ops(step.gained.controls) for step in steps),
        added_edges=sum(len(controls) for step in steps for controls in step.gained.controls.values()),
        plan_seconds=time.perf_counter() - started,
        mixed={**last.graph.mixed, **separated.mixed},
        notes=tuple(dict.fromkeys(note for step in steps for note in step.notes)),
        tasks=_tasks(steps, separated.graph_def) if with_tasks else {},
    )


def _tasks(steps: Sequence[_Ordered], graph_def: graph_pb2.GraphDef) -> dict[str, TaskKey]:
    """Return the tasks of ops that compute; the stage is the layer, the micro-batch the step's number.

    An op that several steps share belongs to the step with which it is marked.
    """
    numbers = dict(zip((node.name for node in graph_def.node), steps_of(graph_def), strict=True))
    return {
        name: TaskKey(task.kind, task.stage, number)
        for number, step in enumerate(steps)
        for name, task in tasks_of_ops(step.graph).items()
        if numbers[name] == number and task.kind != "comm"
    }


def layer_keys(graph_def: graph_pb2.GraphDef, graph: TrainingGraph) -> list[LayerKey]:
    """Return keys that identify layers in every step and on every rank.

    Names may differ by rank, and the order of layers in parallel branches by graph.  So a layer is the set
    of its variables, as places among all variables in the order in which the step was traced.
    """
    index = {node.name: int(node.attr["index"].i) for node in graph_def.node if node.op == "_Arg"}
    variables = sorted(graph.variables, key=lambda variable: index.get(variable.handle, 0))
    place = {variable.name: number for number, variable in enumerate(variables)}
    return [tuple(sorted(place[name] for name in layer.variables)) for layer in graph.layers]


def numbered_as(schedule: Schedule, numbers: Sequence[int]) -> Schedule:
    """Put layer ``numbers[i]`` in place of layer ``i``. ScheduleError: their number differs."""
    stages = {task.stage for task in schedule.lanes.get(COMPUTE, ())}
    if stages != set(range(len(numbers))):
        raise ScheduleError(f"the schedule has {len(stages)} layers, the graph {len(numbers)}")
    if list(numbers) == sorted(numbers):
        return schedule
    lanes = {
        lane: TaskList([replace(task, stage=numbers[task.stage]) for task in tasks])
        for lane, tasks in schedule.lanes.items()
    }
    parts = {(kind, numbers[stage]): shares for (kind, stage), shares in schedule.parts.items()}
    return replace(schedule, lanes=lanes, parts=parts)


def _order(
    graph_def: graph_pb2.GraphDef,
    graph: TrainingGraph,
    schedule: Schedule,
    flight_bytes: float,
    dump_dir: Path | None,
) -> _Ordered:
    tasks = task_ops(graph)
    schedule = only_tasks(schedule, tasks.ops)
    notes: list[str] = []
    plan = lower(schedule, graph, tasks, notes)
    edges = communication_edges(schedule, graph, flight_bytes, parts_of(graph_def))
    plan = replace(plan, edges=(*plan.edges, *edges))
    done = passes.ordering_one_step(plan, dump_dir)(graph_def, graph)
    said = told(lambda: places(graph), done.notes, notes)
    return _Ordered(graph, schedule, tasks, additions(graph_def, done.graph_def), said)


def communication_edges(
    schedule: Schedule,
    graph: TrainingGraph,
    flight_bytes: float = FLIGHT_BYTES,
    parts: Mapping[str, int] | None = None,
) -> list[tuple[str, str]]:
    """Return edges that make layers communicate in the schedule's order, a certain amount at a time.

    Communication libraries take gradients as they come, and while one is under way they gather the next into
    one large message, all of which arrives together.  So a layer is handed over when all earlier ones have
    arrived, except two layers and ``flight_bytes``: ranks negotiate about the next while one is under way.
    If the wanted order is not that of the dW, a layer also waits until the one before it can be handed over.

    ``parts`` says which slice of its layer an op sends; slices are treated as layers.
    """
    ready = {task.stage: place for place, task in enumerate(schedule.lanes.get(COMPUTE, ()))}
    sent = _sent(graph, parts or {})
    bytes_of = sent_bytes(graph, schedule.workers)
    edges: list[tuple[str, str]] = []

    def unit_of(task: Task) -> tuple[int, int]:
        """Return the unit of a task; slices that the graph does not have are part of the first."""
        return (task.stage, task.part) if (task.stage, task.part) in sent else (task.stage, 0)

    def size_bytes(layer: int, part: int) -> float:
        shares = schedule.parts.get(("comm", layer), ())
        return bytes_of[layer] * (shares[part] if len(shares) > 1 and (layer, 1) in sent else 1.0)

    def read_by(name: str) -> list[str]:
        return list(graph.ops[name].producers)

    wanted = list(dict.fromkeys(map(unit_of, schedule.lanes.get(COMMUNICATION, ()))))
    sizes = [size_bytes(*unit) for unit in wanted]
    for place, unit in enumerate(wanted):
        through = _through(sizes, place, flight_bytes)
        before = [] if through is None else list(last_ops(sent[wanted[through]], read_by))
        if place and ready.get(unit[0], -1) < ready.get(wanted[place - 1][0], -1):
            firsts = first_ops(sent[wanted[place - 1]], read_by)
            before += dict.fromkeys(name for first in firsts for name in read_by(first))
        edges += itertools.product(before, first_ops(sent[unit], read_by))
    return edges


def _sent(graph: TrainingGraph, parts: Mapping[str, int]) -> _Sent:
    """Return what each layer sends, by slice; ops that are not cut go with the first slice."""
    sent: _Sent = {}
    for layer in graph.layers:
        sent[layer.index, 0] = []
        for name in layer.communication_ops:
            if graph.ops[name].type != "Const":
                sent.setdefault((layer.index, parts.get(name, 0)), []).append(name)
    return sent


def _through(sizes: list[float], place: int, flight_bytes: float) -> int | None:
    """Return the latest place that must have arrived before the one at ``place`` is handed over, or None."""
    flying_bytes = 0.0
    for before in range(place - 1, -1, -1):
        if before < place - 1 and flying_bytes >= flight_bytes:
            return before
        flying_bytes += sizes[before]
    return None


def digest(result: RewriteResult) -> str:
    """Return a short text that is equal on ranks that run the same ops in the same order."""
    graph = result.training_graph
    counts = [*graph.counts().values()]
    shapes = {variable.name: variable.shape for variable in graph.variables}
    layers = []
    for layer in graph.layers:
        ops = layer.weight_grad_ops, layer.update_ops, layer.communication_ops
        layers.append((*map(len, ops), [shapes[name] for name in layer.variables]))
    text = f"{result.schedule.to_text()} {counts} {layers} {result.added_edges}"
    return f"{zlib.crc32(text.encode()):08x}"


def request_to_look(model: keras.Model) -> RewriteRequest[PassResult]:
    """Keep the largest graph of unrolled steps as TensorFlow runs it.

    Its ops are separated as in ordered steps, so that the measured ops are those that will run. ``model``
    names its variables.  Raises BackendError: unsupported TensorFlow, or no plug-in.
    """
    return _request(
        model,
        lambda graph_def: passes.separating_only(graph_def)(graph_def),
        lambda result, before: len(result.graph_def.node) >= len(before.graph_def.node),
    )


@dataclass(frozen=True)
class Taken:
    """Holds a graph that TensorFlow handed over; ``graph_def``: its replacement, in which no op runs."""

    taken: graph_pb2.GraphDef
    graph_def: graph_pb2.GraphDef
    modified: ClassVar[bool] = True


def request_to_take(model: keras.Model) -> RewriteRequest[Taken]:
    """Keep graphs as TensorFlow would run them, and have it run none.

    ``model`` names its variables.  Raises BackendError: unsupported TensorFlow, or no plug-in.
    """
    return _request(
        model,
        lambda graph_def: Taken(graph_protos.copy_of(graph_def), plugin.resting(graph_def)),
        lambda result, before: True,
    )


def request_to_order(
    model: keras.Model,
    schedule_for: ScheduleFor,
    flight_bytes: float = FLIGHT_BYTES,
    planned_for: Sequence[LayerKey] | None = None,
    dump_dir: passes.Folder = None,
    with_tasks: bool = False,
) -> RewriteRequest[RewriteResult]:
    """Request that each graph is ordered by :func:`order_steps`; keep the result in which most ops moved.

    ``model`` names its variables.  Raises BackendError: unsupported TensorFlow, or no plug-in.
    """

    def order(graph_def: graph_pb2.GraphDef) -> RewriteResult:
        result = order_steps(graph_def, schedule_for, flight_bytes, planned_for, dump_dir, with_tasks)
        _LOG.info("ordered the steps by %s in %.2f s", result.schedule.policy, result.plan_seconds)
        return result

    return _request(model, order, lambda result, before: result.moved_ops >= before.moved_ops)


def _request(
    model: keras.Model,
    rewrite: Callable[[graph_pb2.GraphDef], ResultT],
    replaces: Callable[[ResultT, ResultT], bool],
) -> RewriteRequest[ResultT]:
    return RewriteRequest(
        "tf_ooo-parallel",
        lambda graph_def: rewrite(graph_def) if is_unrolled(graph_def) else None,
        replaces,
        lambda request: "TensorFlow handed no graph over to be ordered",
        plugin.describe_keras(model, keras_fits.trained_variables),
    )


def sent_bytes(graph: TrainingGraph, workers: int) -> list[float]:
    """Return for each layer its allreduced bytes; if not known, the bytes of its weights."""
    weights = [weight_bytes for weight_bytes, _ in variable_bytes(graph, [])]
    return [
        _sent_by(graph, layer.communication_ops, workers) or weight_bytes
        for layer, weight_bytes in zip(graph.layers, weights, strict=True)
    ]


def with_weight_bytes(layers: Iterable[LayerCosts], sizes: Iterable[float]) -> tuple[LayerCosts, ...]:
    """Return layers whose weight bytes are those sent, as plans count them; reports show real weights."""
    return tuple(replace(layer, weight_bytes=size) for layer, size in zip(layers, sizes, strict=True))


def _sent_by(graph: TrainingGraph, names: Sequence[str], workers: int) -> float:
    """Return the bytes sent by these ops, 0 if a size or the cost of a way of sending is not known."""
    total = 0.0
    for op in (graph.ops[name] for name in names):
        if op.type in (*_REDUCES, *_GATHERS):
            size = graph.ops[op.producers[0]].output_bytes
            if size is None:
                return 0.0
            total += as_allreduce_bytes(size, workers) if op.type in _GATHERS else size
    return total
