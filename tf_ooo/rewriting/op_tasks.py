"""The task of each op of a classified step, to know in a profile what ran."""

from __future__ import annotations

from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from tf_ooo.costs.from_graph import layers_of_weights_and_readers
from tf_ooo.planning.model.schedule import Task
from tf_ooo.rewriting.lowering import task_ops


def tasks_of_ops(graph: TrainingGraph) -> dict[str, Task]:
    """Return tasks by op of one step without micro-batches: F, dO, dW, communication, U of each layer.

    Of the forward pass what the backward pass needs: metrics run at any time.
    """
    backward = {op for kind in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD) for op in graph.of_kind(kind)}
    forward, wanted = layers_of_weights_and_readers(graph), _upstream(graph, backward)
    forward = {n: forward[n] for n in graph.of_kind(OpKind.FORWARD) if n in forward and n in wanted}
    tasks = {name: Task("F", layer) for name, layer in forward.items()}
    for layer in graph.layers:
        tasks.update(dict.fromkeys(layer.communication_ops, Task("comm", layer.index)))
        tasks.update(dict.fromkeys(layer.update_ops, Task("U", layer.index)))
    for task, names in task_ops(graph).ops.items():
        tasks.update(dict.fromkeys(names, task))
    return {name: task for name, task in tasks.items() if graph.ops[name].type != "Const"}


def _upstream(graph: TrainingGraph, names: set[str]) -> set[str]:
    """These ops and all that they read, and what those read."""
    seen, stack = set(names), list(names)
    while stack:
        op = graph.ops.get(stack.pop())
        new = [] if op is None else [producer for producer in op.producers if producer not in seen]
        seen.update(new)
        stack += new
    return seen
