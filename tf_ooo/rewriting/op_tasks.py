"""The task of each op of a classified step, to know in a profile what ran."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping

from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from tf_ooo.costs.from_graph import layers_of_weights_and_readers
from tf_ooo.planning.model.schedule import Task
from tf_ooo.rewriting.lowering import task_ops

_WEIGHTS, _DATA = 1, 2


def tasks_of_ops(graph: TrainingGraph) -> dict[str, Task]:
    """By name, of one step without micro-batches: F, dO, dW, communication and U of each layer.

    Of the forward pass what the backward pass needs, and what computes: reads of weights, casts of labels and
    metrics run at any time.
    """
    backward = {op for kind in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD) for op in graph.of_kind(kind)}
    forward, wanted = layers_of_weights_and_readers(graph), _upstream(graph, backward)
    forward = {n: forward[n] for n in graph.of_kind(OpKind.FORWARD) if n in forward and n in wanted}
    tasks = {name: Task("F", layer) for name, layer in _computing(graph, forward).items()}
    for layer in graph.layers:
        tasks.update(dict.fromkeys(layer.communication_ops, Task("comm", layer.index)))
        tasks.update(dict.fromkeys(layer.update_ops, Task("U", layer.index)))
    for task, names in task_ops(graph).ops.items():
        tasks.update(dict.fromkeys(names, task))
    return {name: task for name, task in tasks.items() if graph.ops[name].type != "Const"}


def _computing(graph: TrainingGraph, forward: Mapping[str, int]) -> dict[str, int]:
    """The forward ops that need weights and data both, of layers that have such ops."""
    weights = {variable.handle for variable in graph.variables}
    needs: dict[str, int] = {}
    for name, op in graph.ops.items():
        if name in weights:
            needs[name] = _WEIGHTS
        elif not op.producers:
            needs[name] = 0 if op.type == "Const" else _DATA
        else:
            needs[name] = functools.reduce(operator.or_, (needs.get(p, _DATA) for p in op.producers))
    computing = {name for name in forward if needs[name] == _WEIGHTS | _DATA}
    layers = {forward[name] for name in computing}
    return {name: layer for name, layer in forward.items() if name in computing or layer not in layers}


def _upstream(graph: TrainingGraph, names: set[str]) -> set[str]:
    """These ops and all that they read, and what those read."""
    seen, stack = set(names), list(names)
    while stack:
        op = graph.ops.get(stack.pop())
        new = [] if op is None else [producer for producer in op.producers if producer not in seen]
        seen.update(new)
        stack += new
    return seen
