"""Sums that TensorFlow's memory optimizer has taken apart, as one op again.

Where memory may be short it makes of an ``AddN`` a variable, to which each input is added when it comes: the
bits of the sum then depend on what happens to come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.graph.node_input import split_input
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult
from grappler_passes.passes.relaxations import Relaxation
from grappler_passes.passes.verify import verify

_PARTS = {"tmp_var": "TemporaryVariable", "tmp_var_initializer": "Assign"}


@dataclass(frozen=True)
class PlainSumsPass(Pass):
    """Makes an ``AddN`` of each such sum; it has the name of the op that read the variable last."""

    name: ClassVar[str] = "plain_sums"
    relaxes = frozenset({Relaxation.REPLACED_NODES, Relaxation.OPS, Relaxation.SIDE_EFFECTS})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        nodes = {node.name: node for node in graph_def.node}
        sums = [node.name for node in graph_def.node if node.op == "DestroyTemporaryVariable"]
        if not sums:
            return PassResult(graph_def, False)
        readers = _readers(graph_def)
        parts_of = {name: parts for name in sums if (parts := _parts(nodes, readers, name))}
        gone = {part.name for parts in parts_of.values() for part in parts}
        after = graph_protos.with_nodes(graph_def, (n for n in graph_def.node if n.name not in gone))
        for node in after.node:
            if node.name in parts_of:
                _make_sum(node, parts_of[node.name])
        return PassResult(after, bool(parts_of), (), frozenset(gone | parts_of.keys()))

    def postconditions(
        self, before: graph_pb2.GraphDef, result: PassResult, training_graph: TrainingGraph | None
    ) -> None:
        if result.modified:
            verify(before, result.graph_def, replaced=result.replaced, relaxes=self.relaxes)


def _readers(graph_def: graph_pb2.GraphDef) -> dict[str, set[str]]:
    readers: dict[str, set[str]] = {}
    for node in graph_def.node:
        for text in node.input:
            readers.setdefault(split_input(text)[0], set()).add(node.name)
    return readers


def _parts(
    nodes: Mapping[str, node_def_pb2.NodeDef], readers: Mapping[str, set[str]], name: str
) -> list[node_def_pb2.NodeDef]:
    """The nodes that a sum was made into, additions last and in their order; empty where it was not."""
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
    gone = {part.name for part in parts}
    data = [part.input[1] for part in parts[3:]]
    waits = dict.fromkeys(_outside((node, *parts), gone | {split_input(text)[0] for text in data}))
    node.op = "AddN"
    node.input[:] = [*data, *waits]
    node.attr.pop("var_name", None)
    node.attr["N"].i = len(data)


def _outside(nodes: Iterable[node_def_pb2.NodeDef], inside: set[str]) -> Iterable[str]:
    for node in nodes:
        for text in node.input:
            if text[0] == "^" and text[1:] not in inside:
                yield text
