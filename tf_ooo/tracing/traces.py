"""Finds the traces of a step's ``tf.function``s, compares them, and tells the shapes that they get."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from grappler_passes.compat import graph_protos
from tf_ooo.compat import func_graphs, keras_layers, nests, tf_functions, train_function
from tf_ooo.compat.tf_functions import functions_of
from tf_ooo.tracing.assigned import READS

if TYPE_CHECKING:
    import keras
    from tensorflow.core.framework import attr_value_pb2, graph_pb2


Seen = tuple[tuple[int, tuple[int | None, ...]], ...]


class Inputs:
    """Looks at the arguments of a step if it has not seen their kind yet.

    ``elements_per_call``: how many a call takes from an iterator; None: no iterator is looked into.
    """

    def __init__(self, elements_per_call: Callable[[], int] | None = None) -> None:
        self._elements_per_call = elements_per_call
        self._known: set[Any] = set()

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Seen | None]:
        """Return the arguments to go on with, and the tensors' shapes; None for shapes seen before.

        An iterator is looked at once for each kind of element; the step goes on with a replacement iterator.
        """
        seen = nests.shapes_of((args, kwargs))
        specs = tuple(repr(arg.element_spec) for arg in args if train_function.is_iterator(arg))
        if (seen, specs) in self._known:
            return args, None
        self._known.add((seen, specs))
        if self._elements_per_call is None:
            return args, seen
        out = list(args)
        for place, arg in enumerate(args):
            if train_function.is_iterator(arg):
                elements = train_function.take(arg, self._elements_per_call())
                out[place] = train_function.iterator_over(elements, arg) if elements else arg
                seen += nests.shapes_of(elements)
        return tuple(out), seen


# The message is about such an op when the rewritten step may be the one that is kept.
NOT_SHARED = (
    "which the rewritten step would not share; use tf.random.stateless_* or keras.random, or name a schedule"
)


def trace_count(step: Callable[..., Any]) -> int:
    """Return how often the step has been traced."""
    return sum(function.experimental_get_tracing_count() for function in functions_of(step))


def trace(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace the step for these arguments without running it; the call that follows uses that trace.

    If it cannot be traced, that call raises the user's own error.
    """
    for function in functions_of(step)[:1]:
        with contextlib.suppress(Exception):
            function.get_concrete_function(*args, **kwargs)


def forget_traces(model: keras.Model) -> None:
    """Make methods decorated by ``tf.function``, of the model and its parts, be traced anew.

    A trace made while updates were intercepted would go on without them.
    """
    for part in keras_layers.parts_of(model):
        tf_functions.forget_traces(part)


@contextlib.contextmanager
def traced_anew(model: keras.Model) -> Iterator[None]:
    """Trace the model's own functions anew inside the block; no trace is carried in or out."""
    forget_traces(model)
    try:
        yield
    finally:
        forget_traces(model)


def random_state(step: Callable[..., Any]) -> str:
    """Name an op of a trace that draws random numbers from a state of its own; empty if none does.

    Such an op forbids switching between two functions: each begins that state anew.
    """
    # A function with an input_signature would make a trace if asked for its traces.
    traced = (function for function in functions_of(step) if trace_count(function))
    concretes = itertools.chain.from_iterable(map(tf_functions.concrete_functions_of, traced))
    return _random_state_of(op for each in concretes for op in func_graphs.ops_reached_from(each.graph))


def random_state_in(graph_def: graph_pb2.GraphDef) -> str:
    """Say the same as :func:`random_state`, for a graph and its functions."""
    nodes = [*graph_def.node, *(node for f in graph_def.library.function for node in f.node_def)]
    return _random_state_of((node.name, node.op) for node in nodes)


def _random_state_of(ops: Iterable[tuple[str, str]]) -> str:
    name = next((name for name, op_type in ops if graph_protos.keeps_random_state(op_type)), None)
    return "" if name is None else f"{name} draws random numbers from a state of its own"


class RestoringFunction:
    """Wraps a traced function: after its calls all variables are as they were.

    The old values of variables that it changes (``changed``) wait in this process' host memory meanwhile.
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


# These ask for a rewrite, in the second trace only.
_MARKS = "_ooo_"
# TensorFlow numbers these anew in each trace.
_NUMBERED = ("_gradient_op_type", "_user_specified_name")


def differ(step: Callable[..., Any], other: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether two steps' traces for these arguments compute different things; makes missing traces.

    Names of ops and functions do not count.  False if a step is no ``tf.function`` or cannot be traced.
    """
    functions = [functions_of(each)[:1] for each in (step, other)]
    if not all(functions):
        return False
    try:
        traced, again = (function.get_concrete_function(*args, **kwargs) for (function,) in functions)
    except Exception:  # the user's error: the call that follows raises it
        return False
    captured = traced.captured_inputs, again.captured_inputs
    if len(captured[0]) != len(captured[1]) or not all(map(_same_tensor, *captured)):
        return True
    graphs = (function.graph.as_graph_def() for function in (traced, again))
    one, two = (_Contents(graph).of_nodes(graph.node, ()) for graph in graphs)
    return one != two


def _same_tensor(tensor: tf.Tensor, other: Any) -> bool:
    """Return whether two captured tensors are the same: one handle, or constants with equal values."""
    if tensor is other:
        return True
    if tensor.dtype != other.dtype or not tensor.dtype.is_numpy_compatible:
        return False
    return hasattr(tensor, "numpy") and np.array_equal(tensor.numpy(), other.numpy())


class _Contents:
    """Reads a graph so that graphs that differ only in names compare equal; shared functions count once."""

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self._functions = {function.signature.name: function for function in graph_def.library.function}
        self._known: dict[str, int] = {}

    def of_nodes(self, nodes: Iterable[Any], inputs: Iterable[str], returned: Iterable[str] = ()) -> Hashable:
        nodes = list(nodes)
        names = [*inputs, *(node.name for node in nodes)]
        index = {name: number for number, name in enumerate(names)}

        def place(tensor: str) -> Hashable:
            control = tensor.startswith("^")
            name, _, output = tensor.removeprefix("^").partition(":")
            return control, index.get(name, -1), output

        rows = [
            (node.op, node.device, tuple(map(place, node.input)), self._of_attributes(node.attr))
            for node in nodes
        ]
        return tuple(rows), tuple(map(place, returned))

    def _of_attributes(self, attributes: Any) -> Hashable:
        kept = sorted(n for n in attributes if n not in _NUMBERED and not n.startswith(_MARKS))
        return tuple((name, self._of_value(attributes[name])) for name in kept)

    def _of_value(self, value: attr_value_pb2.AttrValue) -> Hashable:
        if value.HasField("func"):
            return self._of_function(value.func.name), self._of_attributes(value.func.attr)
        if value.HasField("list") and value.list.func:
            return tuple(self._of_function(function.name) for function in value.list.func)
        return bytes(value.SerializeToString(deterministic=True))

    def _of_function(self, name: str) -> Hashable:
        function = self._functions.get(name)
        if function is None:
            return name
        if name not in self._known:
            self._known[name] = 0  # a function may call itself
            inputs = [argument.name for argument in function.signature.input_arg]
            returned = [function.ret[argument.name] for argument in function.signature.output_arg]
            self._known[name] = hash(self.of_nodes(function.node_def, inputs, returned))
        return self._known[name]
