"""Compiled functions: one launch that repeats, and the HLO text of one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_ooo.compat import func_graphs, tf_functions, xla_nodes

_CALL = re.compile(r"= .* call\(.*" + xla_nodes.STREAM_ATTRIBUTE + r'="(\d+)"')


def repeated_function(
    graph_def: graph_pb2.GraphDef, inputs: Mapping[str, Any], fetches: Sequence[str], times: int
) -> Callable[..., Any]:
    """A compiled function of the inputs that computes the fetches ``times`` times, one after the other.

    The number is a constant: XLA:GPU then asks nobody whether to go on.  A round's inputs come out of a
    barrier with the results of the one before, so that none can be left out or taken out of the loop.
    ``graph_def`` is flat, its placeholders stand for the ``inputs``, TensorSpecs by ``node:port``;
    ``fetches`` are floats of static shape.
    """
    body = func_graphs.without_placeholders(graph_def)

    def run(*given: Any) -> list[Any]:
        def again(_: Any, tensors: list[Any], results: list[Any]) -> tuple[list[Any], list[Any]]:
            behind = xla_nodes.barrier([*tensors, *results])
            inside = behind[: len(tensors)]
            fetched = func_graphs.import_here(body, dict(zip(inputs, inside, strict=True)), list(fetches))
            return inside, [tf.cast(new, old.dtype) for new, old in zip(fetched, results, strict=True)]

        first = func_graphs.import_here(body, dict(zip(inputs, given, strict=True)), list(fetches))
        state = (tf.constant(1), list(given), first)
        looped = tf.while_loop(
            lambda number, *_: number < times, lambda n, t, r: (n + 1, *again(n, t, r)), state
        )
        return list(looped[2])

    function: Callable[..., Any] = tf_functions.plain_function(run, list(inputs.values()), compiled=True)
    return function


def run_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that a compiled function raises where XLA cannot compile or start it."""
    return (tf.errors.OpError,)


def hlo_of(function: Any, specs: Sequence[Any], stage: str = "hlo") -> str:
    """Return the HLO text of a compiled function before (``hlo``) or after (``optimized_hlo``) XLA's passes.

    The device is named, although TensorFlow warns of that: else it draws a random number, and the user's
    change.
    """
    with tf.init_scope():
        device = tf.identity(tf.constant(0.0)).device
    ask = function.experimental_get_compiler_ir(*specs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text: str = ask(stage=stage, device_name=device)
    return text


def stream_calls(hlo: str) -> list[int]:
    """Return the stream of each annotated call in an HLO text."""
    return [int(match[1]) for line in hlo.splitlines() if (match := _CALL.search(line))]
