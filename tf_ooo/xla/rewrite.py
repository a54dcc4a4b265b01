"""GraphDef of a step in, GraphDef with dW on side streams out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grappler_passes.classify import classify_graph_def
from grappler_passes.compat import infer_some_outputs
from grappler_passes.edit import GraphEditor
from grappler_passes.graph import OpKind, TrainingGraph
from tf_ooo.errors import GraphError
from tf_ooo.lowering import TaskOps, task_ops
from tf_ooo.schedule import Schedule, Task
from tf_ooo.xla import compat
from tf_ooo.xla.barriers import hold_back, join, store_activations
from tf_ooo.xla.outline import CALL_PREFIX, Call, outline
from tf_ooo.xla.regions import FlatStep, Port, Region, find_regions

Plan = Callable[[TrainingGraph, TaskOps, Collection[int], Any], Schedule]


@dataclass(frozen=True)
class StreamRewrite:
    """What was done to one graph.

    Attributes:
        graph_def: the rewritten graph, flat but for loops.
        fetches: the tensors of the results in it, ``node:port``.
        calls: the side streams' calls, in the schedule's order.
        left: ``{layer name: why its dW stays on the main stream}``.
        barriers: how many were added.
    """

    training_graph: TrainingGraph
    schedule: Schedule
    graph_def: Any
    fetches: tuple[str, ...]
    calls: tuple[Call, ...]
    left: Mapping[str, str]
    barriers: int
    store: str
    plan_seconds: float = 0.0

    @property
    def key(self) -> Any:
        """Equal for rewrites of one graph that come to the same."""
        return self.store, tuple((call.name, call.stream, call.waits_for) for call in self.calls)

    @property
    def moved_ops(self) -> int:
        """Ops that now run on a side stream."""
        return sum(len(call.region.ops) for call in self.calls)


def rewrite_step(graph_def: Any, fetches: Sequence[str], plan: Plan, store: str = "all") -> StreamRewrite:
    """Classifies the step, asks ``plan`` which dW go where, and puts those into calls on streams.

    Args:
        graph_def: of the traced step; not changed.
        fetches: the tensors of its results, ``node:port``.
        plan: makes the schedule from the classified step, its tasks, the layers whose dW can be moved,
            and the flat graph.
        store: who reads stored activations, see ``barriers.store_activations``.

    Raises:
        GraphError: not a training step, or none of its dW can be moved; says why.
    """
    started = time.perf_counter()
    nodes = list(dict.fromkeys(text.partition(":")[0] for text in fetches))
    functional, lowered = compat.flat_graphs(graph_def, nodes)
    graph = classify_graph_def(lowered, nodes)
    tasks = task_ops(graph)
    step = FlatStep(functional, infer_some_outputs(functional), fetches)
    regions, left = regions_by_layer(step, graph, tasks)
    if not regions:
        raise GraphError(f"no weight gradient can run on a stream of its own: {_shown(left)}")
    schedule = plan(graph, tasks, set(regions), lowered)
    made = apply_schedule(step, graph, tasks, schedule, regions, store)
    return replace(made, left=left, plan_seconds=time.perf_counter() - started)


def regions_by_layer(
    step: FlatStep, graph: TrainingGraph, tasks: TaskOps
) -> tuple[dict[int, list[Region]], dict[str, str]]:
    """The regions of each layer that has any, and for the others the reason."""
    regions: dict[int, list[Region]] = {}
    left: dict[str, str] = {}
    for layer in graph.layers:
        names = tasks.ops.get(Task("dW", layer.index), ())
        found = find_regions(step, graph, names) if names else "it has no dW of its own"
        if isinstance(found, str):
            left[layer.name] = found
        else:
            regions[layer.index] = found
    return regions, left


def _shown(left: Mapping[str, str]) -> str:
    reasons = list(dict.fromkeys(left.values()))
    return "; ".join(reasons[:3]) or "there is no layer with a weight gradient"


def apply_schedule(
    step: FlatStep,
    graph: TrainingGraph,
    tasks: TaskOps,
    schedule: Schedule,
    regions: Mapping[int, list[Region]],
    store: str,
) -> StreamRewrite:
    """The graph with the side lanes' dW in calls, ordered by barriers."""
    calls = make_calls(step, graph, tasks, schedule, regions)
    editor = GraphEditor(step.graph_def)
    moved = store_activations(editor, step, graph, calls, store)
    moved |= outline(editor, step, calls, moved)
    barriers = hold_back(editor, step, calls, moved)
    joined = join(editor, step, calls, moved, last_of_main(step, graph, calls))
    fetches = tuple(_fetch(port, moved, joined, calls) for port in step.fetches)
    made = editor.finish()
    for node in made.node:
        node.attr.pop("_class", None)
    return StreamRewrite(graph, schedule, made, fetches, tuple(calls), {}, barriers + joined, store)


def _fetch(port: Port, moved: Mapping[Port, Port], joined: bool, calls: Sequence[Call]) -> str:
    name, number = moved.get(port, port)
    if joined and port in moved:
        behind = [old for call in calls for old in call.region.outputs]
        name, number = "ooo_join", behind.index(port)
    return f"{name}:{number}"


def make_calls(
    step: FlatStep,
    graph: TrainingGraph,
    tasks: TaskOps,
    schedule: Schedule,
    regions: Mapping[int, list[Region]],
) -> list[Call]:
    """The calls of all dW in side lanes, in the lanes' order."""
    waits = {task: other for task, other, steps in schedule.after if not steps}
    calls: list[Call] = []
    for (_, stream), lane in schedule.lanes.items():
        for task in lane if stream else ():
            for number, region in enumerate(regions.get(task.stage, ()) if task.kind == "dW" else ()):
                after = ends_of(step, graph, tasks, waits.get(task))
                calls.append(Call(f"{CALL_PREFIX}_{task.stage}_{number}", region, stream, after))
    return calls


def ends_of(step: FlatStep, graph: TrainingGraph, tasks: TaskOps, task: Task | None) -> tuple[Port, ...]:
    """The tensors that are there when a dO task is done: those of its ops that later ones read."""
    if task is None or task not in tasks.ops:
        return ()
    names = set(tasks.ops[task])
    ends = []
    for name in tasks.ops[task]:
        if name not in step.nodes or step.nodes[name].op != graph.ops[name].type:
            continue
        read = {(reader, port) for reader, port in step.readers[name] if port >= 0}
        if any(reader in names for reader, _ in read):
            continue
        ends += [(name, port) for port in sorted({port for _, port in read})]
    return tuple(port for port in ends if _is_number(step, port))


def _is_number(step: FlatStep, port: Port) -> bool:
    info = step.info(port)
    return info is not None and info.dtype in compat.MLIR_TYPES


def last_of_main(step: FlatStep, graph: TrainingGraph, calls: Sequence[Call]) -> tuple[Port, ...]:
    """The tensors that the main stream's backward pass ends with: nothing of it reads them."""
    backward = {OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD}
    behind = _downstream(step, {name for call in calls for name in call.region.own})
    mine = {
        name
        for name, op in graph.ops.items()
        if op.kind in backward
        and name in step.nodes
        and name not in behind
        and step.nodes[name].op == op.type
    }
    ends = []
    for name in sorted(mine):
        read = [(reader, port) for reader, port in step.readers[name] if port >= 0]
        if not any(reader in mine for reader, _ in read):
            ends += [(name, port) for port in sorted({port for _, port in read})]
    return tuple(port for port in ends if _is_float(step, port))


def _downstream(step: FlatStep, names: set[str]) -> set[str]:
    found, stack = set(names), list(names)
    while stack:
        for reader, _ in step.readers[stack.pop()]:
            if reader not in found:
                found.add(reader)
                stack.append(reader)
    return found


def _is_float(step: FlatStep, port: Port) -> bool:
    info = step.info(port)
    return info is not None and info.dtype.startswith(("float", "bfloat"))
