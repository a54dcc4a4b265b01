"""Finds the ops of a graph's forward tasks that say when the task ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from grappler_passes.graph.dependencies import reached
from tf_ooo.planning.model.task import Task

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

# The bit of what a variable holds; those below it are stages.
_WEIGHTS = 1 << 4096
_READING = ("ReadVariableOp", "Resource")


def timed_ops(graph_def: graph_pb2.GraphDef, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks of ops, without ops of F that may run long before the task does.

    Metrics, which the backward pass does not need, and what reads labels only: neither a weight nor an output
    of another stage.  A task that has no other ops keeps them.
    """
    producers = _producers(graph_def)
    backward = [name for name, task in tasks.items() if task.kind in ("dO", "dW")]
    needed, reads = (
        reached(backward, lambda name: producers.get(name, ())),
        _reads(graph_def, producers, tasks),
    )
    stages = {task.stage for task in tasks.values() if task.kind == "F"}

    def counts(name: str, task: Task) -> bool:
        early = task.stage > min(stages) and not reads[name] & ~(1 << task.stage)
        return task.kind != "F" or (name in needed and not early)

    kept = {name: task for name, task in tasks.items() if counts(name, task)}
    lost = set(tasks.values()) - set(kept.values())
    return {name: task for name, task in tasks.items() if name in kept or task in lost}


def _producers(graph_def: graph_pb2.GraphDef) -> dict[str, list[str]]:
    """Return the producers of each op's data."""
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
