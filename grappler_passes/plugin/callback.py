"""Answers TensorFlow's call: finds the request, rewrites, checks, answers.

Nothing may be raised here: ctypes would print it and TensorFlow would never know.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from grappler_passes.compat import graph_protos, runtime
from grappler_passes.graph.node_input import split_input
from grappler_passes.plugin.answer import check_answer
from grappler_passes.plugin.requests import DONE_ATTR, REQUEST_ATTR, SEEN_ATTR, Request, find, logger
from grappler_passes.plugin.watching import watched

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, tensor_pb2

_REFUSED, _RESTS = "ooo_refused", "ooo_rests"


def answer(data: bytes, device_type: str = "CPU") -> bytes | None:
    """Return the serialized new graph for a serialized graph; None to leave it as it is.  Never raises.

    TensorFlow runs its optimizers twice, plug-ins last.  The graph is rewritten in the second round: what was
    added earlier would keep some ops from being fused, and a fused op may round differently.

    What a rewrite itself has TensorFlow compile, on its own thread, is left as it is.
    """
    if _under_way.nested:
        return None
    _under_way.nested = True
    try:
        return _answer_once(data, device_type)
    finally:
        _under_way.nested = False


class _UnderWay(threading.local):
    nested = False


_under_way = _UnderWay()


def _answer_once(data: bytes, device_type: str) -> bytes | None:
    request: Request | None = None
    try:
        graph_def = graph_protos.parse_graph_def(data)
        request = _request_of(graph_def)
        if request is None:
            return None
        return _answer(request, graph_def, device_type)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: whoever ran the step raises them
        _record(request, error)
        return None


def _request_of(graph_def: graph_pb2.GraphDef) -> Request | None:
    """Return the request that the graph's arguments are marked with, if it is still registered."""
    for node in graph_def.node:
        if node.op == "_Arg" and REQUEST_ATTR in node.attr:
            return find(node.attr[REQUEST_ATTR].s.decode())
    return None


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
    before = graph_protos.copy_of(graph_def)  # to compare with, whatever the rewrite does to its argument
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
    """Set it on the arguments, whose attributes nothing between the two calls drops."""
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
    check = out.node.add(name=_REFUSED, op="Assert", device=device)
    check.input.extend([f"{_REFUSED}/condition", f"{_REFUSED}/message"])
    check.attr["T"].list.type.append(graph_protos.tensor_proto("").dtype)
    return out


def resting(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return a copy of the graph of which nothing runs; it returns zeros.

    All work waits for the branch of a condition that is not taken.
    """
    out = _waiting_for(graph_def, _RESTS)
    condition = graph_protos.tensor_proto(False)
    device = _constant(out, f"{_RESTS}/condition", condition)
    switch = out.node.add(name=f"{_RESTS}/switch", op="Switch", device=device)
    switch.input.extend([f"{_RESTS}/condition"] * 2)
    never = out.node.add(name=_RESTS, op="Identity", device=device, input=[f"{_RESTS}/switch:1"])
    for node in (switch, never):
        node.attr["T"].type = condition.dtype
    arguments = {node.name for node in out.node if node.op == "_Arg"}
    for node in [node for node in out.node if node.op == "_Retval"]:
        if split_input(node.input[0])[0] not in arguments:
            name = f"{_RESTS}/{node.name}"
            _constant(out, name, graph_protos.zero_of(node.attr["T"].type))
            del node.input[:]
            node.input.append(name)
    return out


def _waiting_for(graph_def: graph_pb2.GraphDef, name: str) -> graph_pb2.GraphDef:
    """A copy in which what only reads arguments waits for a node: there work begins, all else follows."""
    out = graph_protos.copy_of(graph_def)
    arguments = {node.name for node in out.node if node.op == "_Arg"}
    for node in out.node:
        if node.op not in ("_Arg", "_Retval") and all(
            split_input(text)[0] in arguments for text in node.input
        ):
            node.input.append(f"^{name}")
    return out


def _constant(graph_def: graph_pb2.GraphDef, name: str, value: tensor_pb2.TensorProto) -> str:
    """Adds a constant on this process' host; returns that device."""
    device = runtime.host_device(graph_def.node[0].device)
    node = graph_def.node.add(name=name, op="Const", device=device)
    node.attr["dtype"].type = value.dtype
    node.attr["value"].tensor.CopyFrom(value)
    return device
