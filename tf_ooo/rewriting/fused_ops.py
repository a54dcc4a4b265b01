"""Takes apart what TensorFlow's remapper has fused: XLA, which fuses by itself, knows the parts only."""

from __future__ import annotations

from collections.abc import Sequence

from tensorflow.core.framework import node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import data_inputs

# The op that a fused one begins with, and how many of its inputs are that one's.
_FIRST = {"_FusedMatMul": ("MatMul", 2), "_FusedConv2D": ("Conv2D", 2)}
_UNARY = "_UnaryOpsComposition"
_BIAS = "BiasAdd"
_ACTIVATIONS = frozenset({"Relu", "Relu6", "Elu", "Tanh", "Sigmoid", "LeakyRelu"})


def parts_of(node: node_def_pb2.NodeDef, given: Sequence[str] | None = None) -> list[node_def_pb2.NodeDef]:
    """Return the ops that a fused one stands for, the last under its name; none for another op.

    ``given``: its data inputs under other names.  One with parts that are not known is not taken apart.
    """
    names = [name.decode() for name in node.attr["fused_ops"].list.s] if "fused_ops" in node.attr else []
    if node.op == _UNARY:
        first, names, count = "", [name.decode() for name in node.attr["op_names"].list.s], 1
    elif node.op in _FIRST and _ACTIVATIONS.issuperset(set(names) - {_BIAS}):
        first, count = _FIRST[node.op]
    else:
        return []
    inputs = list(data_inputs(node) if given is None else given)
    current, extra = inputs[:count], inputs[count:]
    parts: list[node_def_pb2.NodeDef] = []
    for place, op in enumerate([first, *names] if first else names):
        reads = [*current, extra.pop(0)] if op == _BIAS else current
        last = place == len(names) - (0 if first else 1)
        parts.append(_part(node, op, node.name if last else f"{node.name}/part_{place}", reads))
        current = [parts[-1].name]
    return parts


def _part(node: node_def_pb2.NodeDef, op: str, name: str, inputs: Sequence[str]) -> node_def_pb2.NodeDef:
    part = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
    for attribute in graph_protos.op_def(op).attr:
        own = "leakyrelu_alpha" if (op, attribute.name) == ("LeakyRelu", "alpha") else attribute.name
        value = node.attr.get(own, attribute.default_value)
        part.attr[attribute.name].CopyFrom(value)
    return part
