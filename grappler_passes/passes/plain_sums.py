"""Gives a fixed order to sums whose bits would depend on which input happens to come first.

When memory may be short, TensorFlow's memory optimizer turns an ``AddN`` into a variable, to which each input
is added when it comes.  ``AddN`` itself begins with the first input whose buffer nobody else needs any more:
if inputs have other readers, that input differs from run to run (tensorflow/core/kernels,
``aggregate_ops.cc``).  A sum of two is the same in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import control_inputs, data_inputs, split_input
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import PassResult, Relaxation
from grappler_passes.passes.verify import VerifiedPass

_ROUNDED = {types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_HALF, types_pb2.DT_BFLOAT16}
# AddN adds up to this many inputs to its sum at once.
_AT_ONCE = 8
_PARTS = {"tmp_var": "TemporaryVariable", "tmp_var_initializer": "Assign"}


@dataclass(frozen=True)
class PlainSumsPass(VerifiedPass):
    """Turns sums kept in a variable, and ``AddN`` of shared inputs, into additions in their order.

    The sum keeps its name; if it was a variable, it gets the name of the op that read the variable last.
    """

    name: ClassVar[str] = "plain_sums"
    relaxes = frozenset(
        {Relaxation.REPLACED_NODES, Relaxation.OPS, Relaxation.SIDE_EFFECTS, Relaxation.NEW_NODES}
    )

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        parts_of = _taken_apart(graph_def)
        gone = {part.name for parts in parts_of.values() for part in parts}
        after = graph_protos.with_nodes(graph_def, (n for n in graph_def.node if n.name not in gone))
        for node in after.node:
            if node.name in parts_of:
                _make_sum(node, parts_of[node.name])
        shared = list(_sums_of_shared(after))
        after.node.extend([addition for node in shared for addition in _additions(node)])
        changed = gone | parts_of.keys() | {node.name for node in shared}
        return PassResult(after, True, (), frozenset(changed)) if changed else PassResult(graph_def, False)


def _taken_apart(graph_def: graph_pb2.GraphDef) -> dict[str, list[node_def_pb2.NodeDef]]:
    nodes = {node.name: node for node in graph_def.node}
    sums = [node.name for node in graph_def.node if node.op == "DestroyTemporaryVariable"]
    readers: dict[str, set[str]] = {}
    for node in graph_def.node if sums else ():
        for text in node.input:
            readers.setdefault(split_input(text)[0], set()).add(node.name)
    return {name: parts for name in sums if (parts := _parts(nodes, readers, name))}


def _sums_of_shared(graph_def: graph_pb2.GraphDef) -> Iterator[node_def_pb2.NodeDef]:
    """Yield the sums of three or more inputs, at least one of which has other readers too."""
    sums = [
        node
        for node in graph_def.node
        if node.op == "AddN" and node.attr["N"].i > 2 and node.attr["T"].type in _ROUNDED
    ]
    if sums:
        reads = Counter(text for node in graph_def.node for text in data_inputs(node))
        yield from (node for node in sums if any(reads[text] > 1 for text in data_inputs(node)))


def _additions(node: node_def_pb2.NodeDef) -> list[node_def_pb2.NodeDef]:
    """Turn the node into the last of its additions, in place; return the other additions."""
    data, waits = data_inputs(node), control_inputs(node)
    first = len(data) % _AT_ONCE
    first += _AT_ONCE if first < 2 else 0  # AddN begins with two to nine
    pieces = [data[:first], *(data[at : at + _AT_ONCE] for at in range(first, len(data), _AT_ONCE))]
    node.op = "AddV2"
    del node.attr["N"]
    additions: list[node_def_pb2.NodeDef] = []

    def total_of(terms: Sequence[str]) -> str:
        total = terms[0]
        for term in terms[1:]:
            addition = node_def_pb2.NodeDef()
            addition.CopyFrom(node)
            addition.name = f"{node.name}/addition_{len(additions)}"
            addition.input[:] = [total, term]
            additions.append(addition)
            total = addition.name
        return total

    total_of([total_of(piece) for piece in pieces])
    node.input[:] = [*additions.pop().input, *waits]
    return additions


def _parts(
    nodes: Mapping[str, node_def_pb2.NodeDef], readers: Mapping[str, set[str]], name: str
) -> list[node_def_pb2.NodeDef]:
    """Return the nodes that a sum was turned into, additions last and in order; empty if it was not."""
    expected = [nodes.get(f"{name}/{part}") for part in (*_PARTS, "tmp_var_zeros")]
    while (added := nodes.get(f"{name}/tmp_var_accum_{len(expected) - 3}")) is not None:
        expected.append(added)
    parts = [part for part in expected if part is not None]
    inside = {name, *(part.name for part in parts)}
    is_whole = (
        len(parts) == len(expected) > 4
        and [part.op for part in parts[:2]] == list(_PARTS.values())
        and all(part.op == "AssignAdd" for part in parts[3:])
        and all(readers.get(part.name, set()) <= inside for part in parts)
    )
    return parts if is_whole else []


def _make_sum(node: node_def_pb2.NodeDef, parts: list[node_def_pb2.NodeDef]) -> None:
    data = [part.input[1] for part in parts[3:]]
    inside = {f"^{part.name}" for part in parts} | {f"^{split_input(text)[0]}" for text in data}
    waits = dict.fromkeys(text for part in (node, *parts) for text in control_inputs(part))
    node.op = "AddN"
    node.input[:] = [*data, *(text for text in waits if text not in inside)]
    node.attr.pop("var_name", None)
    node.attr["N"].i = len(data)
