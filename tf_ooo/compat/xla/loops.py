"""A graph that XLA runs several times in one launch of a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_ooo.compat import import_here
from tf_ooo.compat.xla.tracing import compiled_function, without_placeholders


def barrier(tensors: Sequence[Any]) -> list[Any]:
    """The tensors once all of them are there."""
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return list(gen_xla_ops.xla_optimization_barrier(input=list(tensors)))


def repeated_function(
    graph_def: Any, inputs: Mapping[str, Any], fetches: Sequence[str], times: int
) -> Callable[..., Any]:
    """A compiled function of the inputs that computes the fetches ``times`` times, one after the other.

    The number is a constant: XLA:GPU then asks nobody whether to go on.  A round begins when the one before
    has ended, and its inputs come out of a barrier with that one's results, so that no round can be left out
    or taken out of the loop.

    Args:
        graph_def: flat; placeholders stand for the inputs.
        inputs: TensorSpecs by tensor name, ``node:port``.
        fetches: floating-point tensors of static shape.
        times: at least 1.
    """
    import tensorflow as tf

    body = without_placeholders(graph_def)

    def run(*given: Any) -> list[Any]:
        def one(_: Any, tensors: list[Any], results: list[Any]) -> tuple[list[Any], list[Any]]:
            behind = barrier([*tensors, *results])
            inside = behind[: len(tensors)]
            made = import_here(body, dict(zip(inputs, inside, strict=True)), list(fetches))
            return inside, [tf.cast(new, old.dtype) for new, old in zip(made, results, strict=True)]

        first = import_here(body, dict(zip(inputs, given, strict=True)), list(fetches))
        state = (tf.constant(1), list(given), first)
        looped = tf.while_loop(
            lambda number, *_: number < times, lambda n, t, r: (n + 1, *one(n, t, r)), state
        )
        return list(looped[2])

    made: Callable[..., Any] = compiled_function(run, list(inputs.values()))
    return made
