"""The task of each op of a step, to know in a profile what ran, and when a task did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from grappler_passes.graph.dependencies import reached
from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from tf_ooo.costs.from_graph import layers_of_weights_and_readers
from tf_ooo.planning.model.task import Task
from tf_ooo.rewriting.lowering import task_ops

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

# The bit of what a variable holds; those below it are stages.
_WEIGHTS = 1 << 4096
_READING = ("ReadVariableOp", "Resource")


def tasks_of_ops(graph: TrainingGraph) -> dict[str, Task]:
    """Return tasks by op of one step without micro-batches: F, dO, dW, communication, U of each layer.

    Of the forward pass what the backward pass needs: metrics run at any time.
    """
    backward = {op for kind in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD) for op in graph.of_kind(kind)}
    forward = layers_of_weights_and_readers(graph)
    wanted = reached(backward, lambda name: graph.ops[name].producers if name in graph.ops else ())
    forward = {n: forward[n] for n in graph.of_kind(OpKind.FORWARD) if n in forward and n in wanted}
    tasks = {name: Task("F", layer) for name, layer in forward.items()}
    for layer in graph.layers:
        tasks.update(dict.fromkeys(layer.communication_ops, Task("comm", layer.index)))
        tasks.update(dict.fromkeys(layer.update_ops, Task("U", layer.index)))
    for task, names in task_ops(graph).ops.items():
        tasks.update(dict.fromkeys(names, task))
    return {name: task for name, task in tasks.items() if graph.ops[name].type != "Const"}


def timed_ops(graph_def: graph_pb2.GraphDef, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks of ops, without ops of F that may run long before the task does.

    Metrics, which the backward pass does not need, and what reads labels only: neither a weight nor an output
    of another stage.  A task that has no other ops keeps them.
    """
    producers = _producers(graph_def)
    backward = [name for name, task in tasks.items() if task.kind in ("dO", "dW")]
    needed = reached(backward, lambda name: producers.get(name, ()))
    reads = _reads(graph_def, producers, tasks)
    stages = {task.stage for task in tasks.values() if task.kind == "F"}

    def counts(name: str, task: Task) -> bool:
        early = task.stage > min(stages) and not reads[name] & ~(1 << task.stage)
        return task.kind != "F" or (name in needed and not early)

    kept = {name: task for name, task in tasks.items() if counts(name, task)}
    lost = set(tasks.values()) - set(kept.values())
    return {name: task for name, task in tasks.items() if name in kept or task in lost}


def _producers(graph_def: graph_pb2.GraphDef) -> dict[str, list[str]]:
    return {
        node.name: [tensor.partition(":")[0] for tensor in node.input if not tensor.startswith("^")]
        for node in graph_def.node
    }


def _reads(
    graph_def: graph_pb2.GraphDef, producers: Mapping[str, list[str]], tasks: Mapping[str, Task]
) -> dict[str, int]:
    """Return for each op a bit set of what it and its inputs are: F of which stages, readers of weights."""
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for name, read in producers.items():
        for producer in read:
            readers[producer].append(name)
    bits: dict[str, int] = {}
    for node in graph_def.node:
        task = tasks.get(node.name)
        own = 1 << task.stage if task is not None and task.kind == "F" else 0
        bits[node.name] = own | (_WEIGHTS if node.op.startswith(_READING) else 0)
    stack = [name for name, own in bits.items() if own]
    while stack:
        name = stack.pop()
        for reader in readers[name]:
            if bits[reader] | bits[name] != bits[reader]:
                bits[reader] |= bits[name]
                stack.append(reader)
    return bits
