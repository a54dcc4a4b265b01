"""Compiles the calls of a step before it runs, and measures the seconds of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2

from tf_ooo.compat import xla_calls
from tf_ooo.errors import GraphError
from tf_ooo.rewriting.result import RewriteResult

# A call is run once, and this many times more in one function, whose own time the difference leaves out.
_MORE = 3
_ROUNDS = 3
# After ops were taken out, the others may fail for another reason.
_TRIES = 3
_REFUSALS = (
    *(tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.NotFoundError),
    *(tf.errors.FailedPreconditionError, tf.errors.InternalError),
)
# A call is known by its function's name, its device, and the shapes of its arguments.
Called = tuple[str, str, tuple[tuple[int, ...], ...]]


def as_compiled(make: Callable[[frozenset[str]], RewriteResult]) -> RewriteResult:
    """Return a step whose calls XLA has compiled, for each device that makes the call.

    ``make`` rewrites the step, leaving the given ops as they are.  XLA only finds out what it cannot compile,
    such as a shape that another task computes, when it tries.  Raises GraphError if it still cannot compile
    what is left; nothing of the step has run.
    """
    refused, why_not = frozenset[str](), ""
    for _ in range(_TRIES):
        result = make(refused)
        assert result.compiled is not None
        failed = _compile(result.graph_def)
        if not failed and (result.compiled.calls or not why_not):
            return replace(result, compiled=replace(result.compiled, why_not=why_not))
        refused |= {op for call in failed for op in result.compiled.calls[call]}
        why_not = why_not or next(iter(failed.values()))
    raise GraphError(f"XLA cannot compile a task: {why_not}")


def _compile(graph_def: graph_pb2.GraphDef) -> dict[str, str]:
    """Have XLA compile each function on zeros, devices in parallel; return why not, by call."""
    functions, called = _functions(graph_def), _called(graph_def)
    if not _why_not(functions, called.values()):
        return {}
    why_not = {at: _why_not(functions, [at]) for at in dict.fromkeys(called.values())}
    return {name: why_not[at] for name, at in called.items() if why_not[at]}


def _why_not(functions: Mapping[str, function_pb2.FunctionDef], called: Iterable[Called]) -> str:
    """Say why XLA cannot compile the functions; empty if it can.  GraphError if something else fails."""
    try:
        xla_calls.run_calls([(functions[name], *where) for name, *where in dict.fromkeys(called)])()
    except (*_REFUSALS, ValueError) as error:
        return str(error).splitlines()[0]
    except tf.errors.OpError as error:  # a device that is full, or a worker that is lost
        raise GraphError(f"XLA cannot compile a task: {str(error).splitlines()[0]}") from error
    return ""


def call_seconds(graph_def: graph_pb2.GraphDef) -> dict[str, float]:
    """Return the seconds of each compiled call run alone, by name; calls of one function get the same."""
    functions, called = _functions(graph_def), _called(graph_def)
    alone_s = {at: _measured_s(functions[at[0]], *at[1:]) for at in dict.fromkeys(called.values())}
    return {name: alone_s[at] for name, at in called.items()}


def _functions(graph_def: graph_pb2.GraphDef) -> dict[str, function_pb2.FunctionDef]:
    return {function.signature.name: function for function in graph_def.library.function}


def _called(graph_def: graph_pb2.GraphDef) -> dict[str, Called]:
    calls = filter(xla_calls.is_call, graph_def.node)
    return {node.name: (node.attr["f"].func.name, node.device, xla_calls.shapes_of(node)) for node in calls}


def _measured_s(function: function_pb2.FunctionDef, device: str, shapes: xla_calls.Shapes) -> float:
    called = [(function, device, shapes)]
    once, more = (xla_calls.run_calls(called, times) for times in (1, 1 + _MORE))
    once(), more()
    return max(0.0, statistics.median(_seconds(more) - _seconds(once) for _ in range(_ROUNDS)) / _MORE)


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
