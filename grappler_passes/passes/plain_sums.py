"""Sums that TensorFlow's memory optimizer has taken apart, as one op again.

Where a graph may need most of a device's memory, that optimizer makes of an ``AddN`` of three and more a
variable, to which each input is added when it comes (``TemporaryVariable``, ``AssignAdd``): the bits of the
sum then depend on what happens to come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.graph.node_input import split_input

_PARTS = {"tmp_var": "TemporaryVariable", "tmp_var_initializer": "Assign"}


def with_plain_sums(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with an ``AddN`` for each such sum; the same object where there is none."""
    nodes = {node.name: node for node in graph_def.node}
    sums = [node.name for node in graph_def.node if node.op == "DestroyTemporaryVariable"]
    if not sums:
        return graph_def
    readers: dict[str, set[str]] = {}
    for node in graph_def.node:
        for text in node.input:
            readers.setdefault(split_input(text)[0], set()).add(node.name)
    parts = {name: _parts(nodes, readers, name) for name in sums}
    gone = {part.name for found in parts.values() for part in found}
    after = graph_pb2.GraphDef(versions=graph_def.versions)
    after.library.CopyFrom(graph_def.library)
    for node in graph_def.node:
        if node.name not in gone:
            kept = after.node.add()
            kept.CopyFrom(node)
            if parts.get(node.name):
                _make_sum(kept, parts[node.name])
    return after


def _parts(
    nodes: Mapping[str, node_def_pb2.NodeDef], readers: Mapping[str, set[str]], name: str
) -> list[node_def_pb2.NodeDef]:
    """The nodes that a sum was made into, additions last and in their order; empty where it was not."""
    parts = [nodes.get(f"{name}/{part}") for part in (*_PARTS, "tmp_var_zeros")]
    while (added := nodes.get(f"{name}/tmp_var_accum_{len(parts) - 3}")) is not None:
        parts.append(added)
    found = [part for part in parts if part is not None]
    inside = {name, *(part.name for part in found)}
    as_made = (
        len(found) == len(parts) > 4
        and [part.op for part in found[:2]] == list(_PARTS.values())
        and all(part.op == "AssignAdd" for part in found[3:])
        and all(readers.get(part.name, set()) <= inside for part in found)
    )
    return found if as_made else []


def _make_sum(node: node_def_pb2.NodeDef, parts: list[node_def_pb2.NodeDef]) -> None:
    gone = {part.name for part in parts}
    data = [part.input[1] for part in parts[3:]]
    waits = dict.fromkeys(_outside((node, *parts), gone | {split_input(text)[0] for text in data}))
    node.op = "AddN"
    del node.input[:]
    node.input.extend([*data, *waits])
    node.attr.pop("var_name", None)
    node.attr["N"].i = len(data)


def _outside(nodes: Iterable[node_def_pb2.NodeDef], inside: set[str]) -> Iterable[str]:
    """Control inputs from elsewhere."""
    for node in nodes:
        for text in node.input:
            if text[0] == "^" and text[1:] not in inside:
                yield text
