"""Checks a rewritten graph before TensorFlow gets it.

TensorFlow survives most bad graphs by itself (it logs and runs the original), but a dropped
``_Retval`` or a malformed device fails the user's call, and a well-formed device that does not exist
kills the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import rustworkx as rx

from grappler_passes.compat import graph_protos, op_types, runtime
from grappler_passes.graph.contexts import MERGES, NEXT_ITERATIONS
from grappler_passes.graph.node_input import split_input

if TYPE_CHECKING:
    from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, op_def_pb2

ENDS = ("_Arg", "_Retval")
_SUMS = ("AddN", "AddV2")


class AnswerError(Exception):
    """The rewritten graph cannot be given to TensorFlow; the message names the node."""


def check_answer(
    before: graph_pb2.GraphDef, after: object, devices: Callable[[], Collection[str]] | None = None
) -> None:
    """Raises :class:`AnswerError` unless ``after`` is a GraphDef that may take the place of ``before``.

    ``devices`` gives the full names of existing devices; called only where a device is new to the graph.
    """
    if not graph_protos.is_graph_def(after):
        raise AnswerError(f"a rewrite gave a {type(after).__name__}; expected a GraphDef or None")
    if not after.node:
        raise AnswerError("a rewrite gave an empty graph")
    nodes = _unique_nodes(after)
    _check_ends(before, after)
    _check_devices(before, after, devices or runtime.runtime_devices)
    _check_ops(before, after)
    _check_inputs(nodes, before)
    _check_acyclic(nodes)


def _unique_nodes(graph_def: graph_pb2.GraphDef) -> dict[str, node_def_pb2.NodeDef]:
    names = Counter(node.name for node in graph_def.node)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise AnswerError(f"two nodes are named {twice[0]!r}")
    return {node.name: node for node in graph_def.node}


def _check_ends(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> None:
    def ends(graph_def: graph_pb2.GraphDef) -> set[tuple[str, str, int, int]]:
        return {(n.op, n.name, n.attr["index"].i, n.attr["T"].type) for n in graph_def.node if n.op in ENDS}

    old, new = ends(before), ends(after)
    for op, name, index, _ in sorted(old ^ new):
        change = "dropped or changed" if (op, name) in {end[:2] for end in old} else "added"
        raise AnswerError(f"{op} {name!r} (index {index}) was {change}; arguments and results must stay")


def _check_devices(
    before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, devices: Callable[[], Collection[str]]
) -> None:
    known = {node.device for node in before.node}
    changed = [node for node in after.node if node.device not in known]
    if not changed:
        return
    existing = set(devices())
    for node in changed:
        if node.device not in existing:
            there = ", ".join(sorted(existing))
            raise AnswerError(
                f"node {node.name!r} was put on {node.device!r}, which does not exist; there are: {there}"
            )


def _check_ops(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> None:
    """Every op is known, and no op with side effects was lost."""
    functions = {function.signature.name for function in after.library.function}
    op_defs = {op: op_types.op_def(op) for op in {n.op for g in (before, after) for n in g.node}}
    for node in after.node:
        if op_defs[node.op] is None and node.op not in functions:
            raise AnswerError(f"node {node.name!r} has op {node.op!r}, which TensorFlow does not know")
    names = {node.name: node.op for node in after.node}
    for node in before.node:
        op_def = op_defs[node.op]
        if node.op == "TemporaryVariable" and names.get(node.name.removesuffix("/tmp_var")) in _SUMS:
            continue  # a sum again: plain_sums.py
        if node.name not in names and op_def is not None and op_def.is_stateful:
            raise AnswerError(f"{node.op} {node.name!r} has side effects and was dropped")


def _check_inputs(nodes: dict[str, node_def_pb2.NodeDef], before: graph_pb2.GraphDef) -> None:
    """Inputs exist; the inputs of nodes that changed, and of nodes that read one, have the right dtype."""
    old = {node.name: node for node in before.node}
    changed = {name for name, node in nodes.items() if old.get(name) != node}
    for node in nodes.values():
        sources = [split_input(source) for source in node.input]
        for name, _ in sources:
            if name not in nodes:
                raise AnswerError(f"node {node.name!r} has input {name!r}, which is not in the graph")
        if node.name in changed or any(name in changed for name, _ in sources):
            _check_types(node, [(nodes[name], port) for name, port in sources if port >= 0])


def _check_types(node: node_def_pb2.NodeDef, sources: list[tuple[node_def_pb2.NodeDef, int]]) -> None:
    wanted = _types(node, of_inputs=True)
    given = [_type_of(source, port) for source, port in sources]
    if wanted is None:
        return
    if len(wanted) != len(given):
        raise AnswerError(f"{node.op} {node.name!r} takes {len(wanted)} inputs, was given {len(given)}")
    for index, (want, have) in enumerate(zip(wanted, given, strict=True)):
        if have is not None and want % 100 != have % 100:  # +100: a reference to a value of that type
            raise AnswerError(f"input {index} of {node.op} {node.name!r} has dtype {have}, expected {want}")


def _type_of(source: node_def_pb2.NodeDef, port: int) -> int | None:
    types = _types(source, of_inputs=False)
    if types is None:
        return None
    if port >= len(types):
        raise AnswerError(
            f"{source.op} {source.name!r} has {len(types)} outputs; output {port} was asked for"
        )
    return types[port]


def _types(node: node_def_pb2.NodeDef, of_inputs: bool) -> list[int] | None:
    """``DataType`` numbers of data inputs, or outputs; None: no op that is registered (a function)."""
    op_def = op_types.op_def(node.op)
    if op_def is None:
        return None
    types: list[int] = []
    for arg in op_def.input_arg if of_inputs else op_def.output_arg:
        if arg.type_list_attr:
            types.extend(_attr(node, op_def, arg.type_list_attr).list.type)
            continue
        count = _attr(node, op_def, arg.number_attr).i if arg.number_attr else 1
        dtype = _attr(node, op_def, arg.type_attr).type if arg.type_attr else arg.type
        types.extend([dtype] * count)
    return types


def _attr(node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef, name: str) -> attr_value_pb2.AttrValue:
    """Return the attribute, or its default: TensorFlow may leave defaults out."""
    if name in node.attr:
        return node.attr[name]
    for attr in op_def.attr:
        if attr.name == name and attr.HasField("default_value"):
            return attr.default_value
    raise AnswerError(f"{node.op} {node.name!r} has no attribute {name!r}")


def _check_acyclic(nodes: dict[str, node_def_pb2.NodeDef]) -> None:
    """No cycle, control edges included; a loop's back edge (NextIteration to Merge) is none."""
    graph = rx.PyDiGraph()
    place = dict(zip(nodes, graph.add_nodes_from(list(nodes)), strict=True))
    edges = []
    for node in nodes.values():
        sources = [split_input(source)[0] for source in node.input]
        if node.op in MERGES:
            sources = [name for name in sources if nodes[name].op not in NEXT_ITERATIONS]
        edges += [(place[name], place[node.name]) for name in sources]
    graph.add_edges_from_no_data(edges)
    if rx.is_directed_acyclic_graph(graph):
        return
    stuck: set[int] = set()
    for component in rx.strongly_connected_components(graph):
        first = component[0]
        if len(component) > 1 or graph.has_edge(first, first):
            stuck |= {first, *rx.descendants(graph, first)}
    raise AnswerError(f"there is a cycle; {len(stuck)} nodes never run, among them {graph[min(stuck)]!r}")
