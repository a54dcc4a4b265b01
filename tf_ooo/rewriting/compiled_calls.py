"""Compiles the calls of a step before it runs, and measures what each takes by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_ooo.compat import xla
from tf_ooo.compat.func_graphs import COMPILED
from tf_ooo.errors import GraphError

# A call is run once and so many times more in one function, whose own time the difference leaves out.
_MORE = 3
_ROUNDS = 3
Called = tuple[str, str]


def compile_calls(graph_def: graph_pb2.GraphDef) -> None:
    """Have XLA compile each function for each device that calls it, side by side, on zeros.

    GraphError: XLA cannot compile one; nothing of the step has run.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    called = {at: (functions[at[0]], at[1]) for at in _called(graph_def).values()}
    try:
        xla.run_calls(list(called.values()))()
    except (tf.errors.OpError, ValueError) as error:
        raise GraphError(f"XLA cannot compile a task: {str(error).splitlines()[0]}") from error


def call_seconds(graph_def: graph_pb2.GraphDef) -> dict[str, float]:
    """Return the seconds of each compiled call by itself, by its name; those of one function are alike."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    called = _called(graph_def)
    alone_s = {at: _measured_s(functions[at[0]], at[1]) for at in dict.fromkeys(called.values())}
    return {name: alone_s[at] for name, at in called.items()}


def _called(graph_def: graph_pb2.GraphDef) -> Mapping[str, Called]:
    """Return function and device of each call."""
    return {n.name: (n.attr["f"].func.name, n.device) for n in graph_def.node if COMPILED in n.attr}


def _measured_s(function: object, device: str) -> float:
    once, more = (xla.run_calls([(function, device)], times) for times in (1, 1 + _MORE))
    once(), more()
    return max(0.0, statistics.median(_seconds(more) - _seconds(once) for _ in range(_ROUNDS)) / _MORE)


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
