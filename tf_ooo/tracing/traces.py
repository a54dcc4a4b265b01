"""Finds the traces of the ``tf.function``s behind a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.compat import op_types
from tf_ooo.compat import func_graphs, keras_layers, tf_functions
from tf_ooo.tracing.assigned import READS

if TYPE_CHECKING:
    import keras
    from tensorflow.core.framework import graph_pb2

# Said of such an op where the rewritten step may be the one that is kept.
NOT_SHARED = (
    "which the rewritten step would not share; use tf.random.stateless_* or keras.random, or name a schedule"
)


def trace_count(step: Callable[..., Any]) -> int:
    """Return how often the step has been traced."""
    return sum(function.experimental_get_tracing_count() for function in tf_functions.functions_of(step))


def trace(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Traces the step for these arguments without running it; the call that follows uses that trace.

    What cannot be traced is left to that call, which raises the user's own error.
    """
    for function in tf_functions.functions_of(step)[:1]:
        try:
            function.get_concrete_function(*args, **kwargs)
        except Exception:  # see above
            return


def forget_traces(model: keras.Model) -> None:
    """Has methods that ``tf.function`` decorates traced anew, of the model and its parts.

    A trace that was made while updates were intercepted would go on without them.
    """
    for part in keras_layers.parts_of(model):
        tf_functions.forget_traces(part)


@contextlib.contextmanager
def traced_anew(model: keras.Model) -> Iterator[None]:
    """Inside the block functions of the model's own are traced; no trace is taken in or out."""
    forget_traces(model)
    try:
        yield
    finally:
        forget_traces(model)


def random_state(*steps: Callable[..., Any]) -> str:
    """Say which op of a trace draws random numbers from a state of its own; empty where none does.

    Such an op forbids going to and fro between two functions: each begins that state anew.
    """
    return next(filter(None, map(_random_state_of, map(_ops_of, steps))), "")


def random_state_in(graph_def: graph_pb2.GraphDef) -> str:
    """Say the same as :func:`random_state`, for a graph and its functions."""
    nodes = [*graph_def.node, *(node for f in graph_def.library.function for node in f.node_def)]
    return _random_state_of((node.name, node.op) for node in nodes)


def _ops_of(step: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Name and type of each op in what was traced and all functions it calls."""
    for function in tf_functions.functions_of(step):
        # Asked for its traces, one with an input_signature would make one.
        traced = tf_functions.concrete_functions_of(function) if trace_count(function) else ()
        for concrete in traced:
            yield from func_graphs.ops_reached_from(concrete.graph)


def _random_state_of(ops: Iterable[tuple[str, str]]) -> str:
    name = next((name for name, op_type in ops if op_types.keeps_random_state(op_type)), None)
    return "" if name is None else f"{name} draws random numbers from a state of its own"


class RestoringFunction:
    """A traced function; after its calls all variables are as they were.

    Values of those that it changes (``changed``) wait in the memory of this process' host meanwhile.
    """

    def __init__(self, concrete: Any) -> None:
        self.concrete, graph = concrete, concrete.graph
        inside = {id(outer): inner for outer, inner in graph.captures}
        self.changed = [
            variable
            for variable in graph.variables
            if any(op.type not in READS for op in inside[id(variable.handle)].consumers())
        ]
        self._before: list[Any] = []

    def __enter__(self) -> RestoringFunction:
        """Begin several calls, after which all is put back once."""
        self._before = [variable.numpy() for variable in self.changed]
        return self

    def __exit__(self, *_: object) -> None:
        for variable, value in zip(self.changed, self._before, strict=True):
            variable.assign(value)
        self._before = []

    def __call__(self, batch: Any) -> Any:
        tensors = tf.nest.flatten(batch, expand_composites=True)
        return self.concrete(*(tensor for tensor in tensors if tensor is not None))
