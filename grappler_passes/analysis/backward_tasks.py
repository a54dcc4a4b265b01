"""The backward pass in tasks: the dO and the dW ops of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grappler_passes.graph.training_graph import Op, OpKind, TrainingGraph

# A task's kind, ``"dO"`` or ``"dW"``, and its layer.
LayerTask = tuple[str, int]


@dataclass(frozen=True)
class BackwardTasks:
    """The ops of each task in topological order, and the layers as the backward pass reaches them."""

    ops: Mapping[LayerTask, tuple[str, ...]]
    layers: tuple[int, ...]


def backward_tasks(graph: TrainingGraph) -> BackwardTasks:
    """Cuts the backward pass into tasks; constants, which can be made at any time, belong to none.

    A layer's dO are the dO ops that its dW ops read, and those upstream that no layer nearer to the loss has.
    """
    place = {name: i for i, name in enumerate(graph.ops)}
    reads: dict[int, list[str]] = {}
    ops: dict[LayerTask, tuple[str, ...]] = {}
    for layer in graph.layers:
        weight_grads = [n for n in layer.weight_grad_ops if n in graph.ops and graph.ops[n].type != "Const"]
        producers = {producer for name in weight_grads for producer in graph.ops[name].producers}
        reads[layer.index] = [name for name in producers if _is_output_grad(graph, name)]
        if weight_grads:
            ops["dW", layer.index] = tuple(weight_grads)
    # Equal places (two layers that read one dO): the higher layer is the one nearer to the loss.
    reached = sorted(reads, key=lambda i: (max((place[name] for name in reads[i]), default=-1), -i))
    claimed: set[str] = set()
    for index in reached:
        own = _upstream(graph, reads[index], claimed, place)
        if own:
            ops["dO", index] = tuple(own)
    return BackwardTasks(ops, tuple(reached))


def _is_output_grad(graph: TrainingGraph, name: str) -> bool:
    return name in graph.ops and graph.ops[name].kind is OpKind.OUTPUT_GRAD


def _upstream(
    graph: TrainingGraph, start: Iterable[str], claimed: set[str], place: Mapping[str, int]
) -> list[str]:
    """The dO ops that ``start`` depends on and that are not claimed, in topological order; claims them."""
    own, stack = [], [name for name in start if name not in claimed]
    while stack:
        name = stack.pop()
        if name in claimed:
            continue
        claimed.add(name)
        if graph.ops[name].type != "Const":
            own.append(name)
        stack += [p for p in producers_of(graph.ops[name]) if _is_output_grad(graph, p) and p not in claimed]
    return sorted(own, key=place.__getitem__)


def producers_of(op: Op) -> list[str]:
    """Return the ops that it waits for, by data and by control edges."""
    return [*op.producers, *op.control_inputs]
