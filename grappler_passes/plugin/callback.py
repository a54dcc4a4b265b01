"""What TensorFlow's call turns into: find the request, rewrite, check, answer.

Nothing may be raised here: ctypes would print it and TensorFlow would never know.
"""

from __future__ import annotations

from typing import Any

from grappler_passes.plugin import compat
from grappler_passes.plugin.answer import check_answer
from grappler_passes.plugin.requests import DONE_ATTR, REQUEST_ATTR, Request, find, logger


def answer(data: bytes) -> bytes | None:
    """The serialized new graph for a serialized graph; None to leave it as it is.  Never raises."""
    request: Request | None = None
    try:
        graph_def = compat.parse_graph_def(data)
        request = _request_of(graph_def)
        if request is None:
            return None
        return _rewrite(request, graph_def)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: see Request.raise_if_failed
        _record(request, error)
        return None


def _request_of(graph_def: Any) -> Request | None:
    """The request that the graph's arguments are marked with, if it is still registered."""
    for node in graph_def.node:
        if node.op == "_Arg" and REQUEST_ATTR in node.attr:
            return find(node.attr[REQUEST_ATTR].s.decode())
    return None


def _rewrite(request: Request, graph_def: Any) -> bytes | None:
    request.count_call()
    if any(DONE_ATTR in node.attr for node in graph_def.node):
        request.skip("rewritten already")
        return None
    before = type(graph_def)()
    before.CopyFrom(graph_def)  # what the check compares with, whatever the rewrite does to its argument
    after = request.rewrite(graph_def)
    if after is None:
        request.skip("nothing to rewrite")
        return None
    check_answer(before, after)
    out = type(graph_def)()
    out.CopyFrom(after)
    _mark_done(out)
    data: bytes = out.SerializeToString()
    request.count_rewrite()
    return data


def _mark_done(graph_def: Any) -> None:
    """On the arguments, whose attributes nothing between the two calls drops."""
    for node in graph_def.node:
        if node.op == "_Arg" and REQUEST_ATTR in node.attr:
            node.attr[DONE_ATTR].b = True


def _record(request: Request | None, error: BaseException) -> None:
    try:
        if request is not None:
            request.fail(error)
        else:
            logger.warning("a graph was left as it is", exc_info=error)
    except BaseException:  # a logging handler of the user's that raises, or a second Ctrl-C
        return
