"""Kinds and layers of the steps of an unrolled graph; steps that are alike are classified once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import STEP_SCOPE
from grappler_passes.graph.node_input import split_input, tensor
from grappler_passes.graph.training_graph import Op, TrainingGraph


def classify_steps(graphs: Sequence[graph_pb2.GraphDef]) -> list[TrainingGraph]:
    """Return each of the graphs of ``split_steps``, classified; GraphError where one is no training step.

    A step that is the one before but for its scope, marks and batch is that step with other names, which is
    faster.  The first steps differ: they hold what several have in common.
    """
    classified: list[TrainingGraph] = []
    for number, graph_def in enumerate(graphs):
        names = _renamed(graphs[number - 1], graph_def, number) if number else None
        same = None if names is None else _with_names(classified[-1], names)
        classified.append(same or classify_graph_def(graph_def))
    return classified


def _renamed(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, number: int) -> Mapping[str, str] | None:
    """Return the name in ``after`` of each node of ``before``, if nothing else differs."""
    if len(before.node) != len(after.node):
        return None
    old, new = f"{STEP_SCOPE}{number - 1}/", f"{STEP_SCOPE}{number}/"
    batch = dict(zip(_batch(before), _batch(after), strict=False))
    names = {node.name: batch.get(node.name, node.name.replace(old, new)) for node in before.node}
    nodes = {node.name: node for node in after.node}
    for node in before.node:
        other = nodes.get(names[node.name])
        if other is None or not _alike(node, other, names):
            return None
    return names


def _batch(graph_def: graph_pb2.GraphDef) -> list[str]:
    """Return the arguments that are no variables, in order."""
    arguments = sorted(
        (node for node in graph_def.node if node.op == "_Arg"), key=lambda node: node.attr["index"].i
    )
    return [node.name for node in arguments if node.attr["T"].type != types_pb2.DT_RESOURCE]


def _alike(node: node_def_pb2.NodeDef, other: node_def_pb2.NodeDef, names: Mapping[str, str]) -> bool:
    if node.op != other.op or node.device != other.device or len(node.input) != len(other.input):
        return False
    renamed = (tensor(names.get(name, name), port) for name, port in map(split_input, node.input))
    if list(renamed) != list(other.input):
        return False
    return node.op == "_Arg" or _attributes(node) == _attributes(other)


def _attributes(node: node_def_pb2.NodeDef) -> dict[str, bytes]:
    """Return the attributes that say what an op does, without notes of optimizers such as a wished place."""
    return {key: value.SerializeToString() for key, value in node.attr.items() if key[0] != "_"}


def _with_names(graph: TrainingGraph, names: Mapping[str, str]) -> TrainingGraph:
    def renamed(old: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[name] for name in old)

    layers = tuple(
        dataclasses.replace(
            layer,
            weight_grad_ops=renamed(layer.weight_grad_ops),
            update_ops=renamed(layer.update_ops),
            communication_ops=renamed(layer.communication_ops),
        )
        for layer in graph.layers
    )
    variables = tuple(dataclasses.replace(v, handle=names.get(v.handle, v.handle)) for v in graph.variables)
    return TrainingGraph(
        ops={names[name]: _renamed_op(op, names) for name, op in graph.ops.items()},
        layers=layers,
        variables=variables,
        unclassified={names.get(name, name): why for name, why in graph.unclassified.items()},
        mixed={names.get(name, name): why for name, why in graph.mixed.items()},
    )


def _renamed_op(op: Op, names: Mapping[str, str]) -> Op:
    return dataclasses.replace(
        op,
        name=names[op.name],
        inputs=tuple((names[producer], port) for producer, port in op.inputs),
        control_inputs=tuple(names[producer] for producer in op.control_inputs),
    )
