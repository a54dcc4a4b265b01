"""Answers TensorFlow's call: finds the request, rewrites, checks, answers.

Nothing may be raised here: ctypes would print it and TensorFlow would never know.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections import Counter
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import rustworkx as rx

from grappler_passes.blocks import if_it_takes
from grappler_passes.compat import graph_protos, runtime
from grappler_passes.compat.graph_protos import split_input
from grappler_passes.graph.dependencies import MERGES, NEXT_ITERATIONS
from grappler_passes.plugin.requests import DONE_ATTR, REQUEST_ATTR, SEEN_ATTR, Request, find, logger

if TYPE_CHECKING:
    from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, op_def_pb2, tensor_pb2


EXPECTED_S = 30.0
"""A rewrite may take so long before it is spoken of, and so much longer for each op of the graph: with
DenseNet121 (18,904 ops), the slowest step of the zoo, it takes 6 s."""
EXPECTED_S_PER_OP = 0.005


def watched(request_id: str, ops: int) -> AbstractContextManager[None]:
    """Warn once, with the line this thread is at, if the block takes too long."""
    limit_s = EXPECTED_S + EXPECTED_S_PER_OP * ops
    return if_it_takes(limit_s, functools.partial(_say, request_id, ops, limit_s, threading.get_ident()))


def _say(request_id: str, ops: int, limit_s: float, thread: int) -> None:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return
    lines = traceback.extract_stack(frame)
    ours = [line for line in lines if "grappler_passes" in line.filename or "tf_ooo" in line.filename]
    at, last = (ours or lines)[-1], lines[-1]
    logger.warning(
        "%s: rewriting a graph of %d ops has taken %.0f s so far; it stands in %s (%s:%d), at %s. Training "
        "goes on when it is done; if that takes too long, end it, leave tf_ooo out and report this line",
        request_id, ops, limit_s, at.name, at.filename, at.lineno, last.name,
    )  # fmt: skip


# Checks a rewritten graph before TensorFlow gets it. TensorFlow survives most bad graphs by itself (it logs
# and runs the original), but a dropped ``_Retval`` or a malformed device fails the user's call, and a well-
# formed device that does not exist kills the process.

ENDS = ("_Arg", "_Retval")
_SUMS = ("AddN", "AddV2")


class AnswerError(Exception):
    """A rewritten graph cannot be given to TensorFlow; the message names the node."""


def check_answer(before: graph_pb2.GraphDef, after: object) -> None:
    """Raise :class:`AnswerError` unless ``after`` is a GraphDef that may replace ``before``."""
    if not graph_protos.is_graph_def(after):
        raise AnswerError(f"a rewrite gave a {type(after).__name__}; expected a GraphDef or None")
    if not after.node:
        raise AnswerError("a rewrite gave an empty graph")
    nodes = _unique_nodes(after)
    _check_ends(before, after)
    _check_devices(before, after)
    _check_ops(before, after)
    _check_inputs(nodes, before)
    _check_acyclic(nodes)


def _unique_nodes(graph_def: graph_pb2.GraphDef) -> dict[str, node_def_pb2.NodeDef]:
    names = Counter(node.name for node in graph_def.node)
    if twice := [name for name, count in names.items() if count > 1]:
        raise AnswerError(f"two nodes are named {twice[0]!r}")
    return {node.name: node for node in graph_def.node}


def _check_ends(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> None:
    def ends(graph_def: graph_pb2.GraphDef) -> set[tuple[str, str, int, int]]:
        return {(n.op, n.name, n.attr["index"].i, n.attr["T"].type) for n in graph_def.node if n.op in ENDS}

    old, new = ends(before), ends(after)
    for op, name, index, _ in sorted(old ^ new):
        change = "dropped or changed" if (op, name) in {end[:2] for end in old} else "added"
        raise AnswerError(f"{op} {name!r} (index {index}) was {change}; arguments and results must stay")


def _check_devices(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> None:
    known = {node.device for node in before.node}
    changed = [node for node in after.node if node.device not in known]
    if not changed:
        return
    existing = set(runtime.runtime_devices())
    for node in changed:
        if node.device not in existing:
            there = ", ".join(sorted(existing))
            raise AnswerError(
                f"node {node.name!r} was put on {node.device!r}, which does not exist; there are: {there}"
            )


def _check_ops(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> None:
    """Check that every op is known, and that no op with side effects was lost."""
    functions = {function.signature.name for function in after.library.function}
    op_defs = {op: graph_protos.op_def(op) for op in {n.op for g in (before, after) for n in g.node}}
    for node in after.node:
        if op_defs[node.op] is None and node.op not in functions:
            raise AnswerError(f"node {node.name!r} has op {node.op!r}, which TensorFlow does not know")
    names = {node.name: node.op for node in after.node}
    for node in before.node:
        op_def = op_defs[node.op]
        if node.op == "TemporaryVariable" and names.get(node.name.removesuffix("/tmp_var")) in _SUMS:
            continue  # plain_sums.py made it a sum again
        if node.name not in names and op_def is not None and op_def.is_stateful:
            raise AnswerError(f"{node.op} {node.name!r} has side effects and was dropped")


def _check_inputs(nodes: dict[str, node_def_pb2.NodeDef], before: graph_pb2.GraphDef) -> None:
    """Check that inputs exist, and that they have the right dtype around nodes that changed."""
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
    """Return ``DataType`` numbers of data inputs or outputs; None if the op is not registered."""
    op_def = graph_protos.op_def(node.op)
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
    """Return the attribute, or its default, since TensorFlow may leave defaults out."""
    if name in node.attr:
        return node.attr[name]
    for attr in op_def.attr:
        if attr.name == name and attr.HasField("default_value"):
            return attr.default_value
    raise AnswerError(f"{node.op} {node.name!r} has no attribute {name!r}")


def _check_acyclic(nodes: dict[str, node_def_pb2.NodeDef]) -> None:
    """Refuse a cycle, control edges included; a loop's back edge (NextIteration to Merge) closes none."""
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


_REFUSED, _RESTS = "ooo_refused", "ooo_rests"


def answer(data: bytes, device_type: str = "CPU") -> bytes | None:
    """Return the rewritten graph, serialized like ``data``, or None to leave it as it is; never raises.

    TensorFlow runs its optimizers twice, plug-ins last.  The graph is rewritten in the second round: what is
    added earlier would keep some ops from being fused, and a fused op may round differently.

    Graphs that a rewrite itself has TensorFlow compile, on its own thread, are left as they are.
    """
    if _under_way.nested:
        return None
    _under_way.nested = True
    request: Request | None = None
    try:
        graph_def = graph_protos.parse_graph_def(data)
        marked = (node for node in graph_def.node if node.op == "_Arg" and REQUEST_ATTR in node.attr)
        if (argument := next(marked, None)) is not None:
            request = find(argument.attr[REQUEST_ATTR].s.decode())
        return None if request is None else _answer(request, graph_def, device_type)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: whoever ran the step raises them
        _record(request, error)
        return None
    finally:
        _under_way.nested = False


class _UnderWay(threading.local):
    nested = False


_under_way = _UnderWay()


def _answer(request: Request, graph_def: graph_pb2.GraphDef, device_type: str) -> bytes | None:
    request.count(calls=1)
    if any(DONE_ATTR in node.attr for node in graph_def.node):
        request.skipped.append("rewritten already")
        return None
    seen = f"{SEEN_ATTR}_{device_type}"
    if not any(seen in node.attr for node in graph_def.node):
        _set_on_arguments(graph_def, seen)
        data: bytes = graph_def.SerializeToString()
        return data
    return _rewrite(request, graph_def)


def _rewrite(request: Request, graph_def: graph_pb2.GraphDef) -> bytes | None:
    before = graph_protos.copy_of(graph_def)  # kept to compare with: the rewrite may change its argument
    try:
        with watched(request.id, len(graph_def.node)):
            after = request.rewrite(graph_def)
    except request.refuse_on as error:
        request.fail(error)
        after = refusing(before, str(error))
    if after is None:
        request.skipped.append("nothing to rewrite")
        return None
    check_answer(before, after)
    out = graph_protos.copy_of(after)
    _set_on_arguments(out, DONE_ATTR)
    data: bytes = out.SerializeToString()
    request.count(rewrites=1)
    return data


def _set_on_arguments(graph_def: graph_pb2.GraphDef, attribute: str) -> None:
    """Set the attribute on the arguments: nothing between the two calls drops attributes there."""
    for node in graph_def.node:
        if node.op == "_Arg" and REQUEST_ATTR in node.attr:
            node.attr[attribute].b = True


def _record(request: Request | None, error: BaseException) -> None:
    try:
        if request is not None:
            request.fail(error)
        else:
            logger.warning("a graph was left as it is", exc_info=error)
    except BaseException:  # a logging handler of the user's that raises, or a second Ctrl-C
        return


def refusing(graph_def: graph_pb2.GraphDef, message: str) -> graph_pb2.GraphDef:
    """Return a copy of the graph in which all work waits for an assertion that fails with ``message``."""
    out = _waiting_for(graph_def, _REFUSED)
    device = _constant(out, f"{_REFUSED}/condition", graph_protos.tensor_proto(False))
    _constant(out, f"{_REFUSED}/message", graph_protos.tensor_proto(message))
    given = [f"{_REFUSED}/condition", f"{_REFUSED}/message"]
    check = out.node.add(name=_REFUSED, op="Assert", device=device, input=given)
    check.attr["T"].list.type.append(graph_protos.tensor_proto("").dtype)
    return out


def resting(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return a copy of the graph in which nothing runs and which returns zeros.

    All work waits for a branch that its condition never takes.
    """
    out = _waiting_for(graph_def, _RESTS)
    condition = graph_protos.tensor_proto(False)
    device = _constant(out, f"{_RESTS}/condition", condition)
    given = [f"{_RESTS}/condition"] * 2
    switch = out.node.add(name=f"{_RESTS}/switch", op="Switch", device=device, input=given)
    never = out.node.add(name=_RESTS, op="Identity", device=device, input=[f"{_RESTS}/switch:1"])
    for node in (switch, never):
        node.attr["T"].type = condition.dtype
    arguments = {node.name for node in out.node if node.op == "_Arg"}
    for node in [node for node in out.node if node.op == "_Retval"]:
        if split_input(node.input[0])[0] not in arguments:
            name = f"{_RESTS}/{node.name}"
            _constant(out, name, graph_protos.zero_of(node.attr["T"].type))
            node.input[:] = [name]
    return out


def _waiting_for(graph_def: graph_pb2.GraphDef, name: str) -> graph_pb2.GraphDef:
    """Return a copy in which nodes that read only arguments, and so all others, wait for a node."""
    out = graph_protos.copy_of(graph_def)
    arguments = {node.name for node in out.node if node.op == "_Arg"}
    for node in out.node:
        if node.op not in ("_Arg", "_Retval") and all(
            split_input(text)[0] in arguments for text in node.input
        ):
            node.input.append(f"^{name}")
    return out


def _constant(graph_def: graph_pb2.GraphDef, name: str, value: tensor_pb2.TensorProto) -> str:
    """Add a constant on this process' host; return the host's device."""
    device = runtime.host_device(graph_def.node[0].device)
    node = graph_def.node.add(name=name, op="Const", device=device)
    node.attr["dtype"].type = value.dtype
    node.attr["value"].tensor.CopyFrom(value)
    return device
