"""``tf.function``, graphs, and the data they are called with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def traced_once(function: Any, signature: Any) -> Any:
    """A ``tf.function`` with one trace; TensorFlow does not warn that there are several such functions."""
    import tensorflow as tf

    made = tf.function(tf.autograph.experimental.do_not_convert(function), input_signature=signature)
    made._omit_frequent_tracing_warning = True
    return made


def same_spec(a: Any, b: Any) -> bool:
    """Whether two nests of type specs are equal."""
    import tensorflow as tf

    try:
        tf.nest.assert_same_structure(a, b)
    except (TypeError, ValueError):
        return False
    return bool(tf.nest.flatten(a) == tf.nest.flatten(b))


@contextlib.contextmanager
def numbered_step(number: int, attribute: str, scope: str) -> Iterator[None]:
    """Ops made inside say which step they belong to: by an attribute, and by their scope if one is given.

    TensorFlow's graph optimizers are not blind to names: in a scope the same step may differ in the last bit.
    """
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2

    graph = tf.compat.v1.get_default_graph()
    mark = {attribute: attr_value_pb2.AttrValue(i=number)}
    named = tf.name_scope(f"{scope}{number}") if scope else contextlib.nullcontext()
    with graph._attr_scope(mark), named:
        yield


def ops_called_by(op: Any) -> list[str]:
    """The types of the ops in the functions that a graph op calls directly."""
    keys = {attr.name for attr in op.op_def.attr} & {"f", "then_branch", "else_branch"}
    functions = [op.graph._get_function(op.get_attr(key).name) for key in sorted(keys)]
    return [node.op for f in functions if f is not None for node in f.cached_definition.node_def]


def is_tf_function(value: Any) -> bool:
    """Whether ``value`` is what ``tf.function`` makes."""
    return hasattr(value, "_list_all_concrete_functions")


def undecorated(function: Any) -> Any:
    """What ``tf.function`` was given, with Python conditions as ops if it was to; others as they are."""
    if not is_tf_function(function):
        return function
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.autograph.impl import api

    converted, context = function.python_function, contextlib.nullcontext()
    if function._autograph:
        context = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
        converted = api.tf_convert(converted, context)

    def call(*args: Any, **kwargs: Any) -> Any:
        with context:  # whoever calls may have switched conversion off
            return converted(*args, **kwargs)

    call.decorated = function  # type: ignore[attr-defined]  # of a method: it is referred to weakly
    return call


def forget_traces(owner: Any) -> None:
    """Has an object's methods that ``tf.function`` decorates traced anew.

    A trace keeps to the variables that were there when it was made.
    """
    for kind in type(owner).__mro__:
        for value in vars(kind).values():
            if is_tf_function(value):
                value._descriptor_cache.pop(owner, None)


def concrete_functions_of(function: Any) -> list[Any]:
    """What a ``tf.function`` has been traced to; asked, one with an input_signature is traced."""
    traced: list[Any] = function._list_all_concrete_functions()
    return traced


def ops_reached_from(graph: Any) -> Iterator[tuple[str, str]]:
    """(name, type) of the ops of a graph and of all functions that it reaches, however old."""
    for op in graph.get_operations():
        yield op.name, op.type
    for function in graph._functions.values():
        definition = function.cached_definition
        for node in definition.node_def:
            yield f"{definition.signature.name}/{node.name}", node.op


def dtype_name(tensor: Any) -> str:
    """``"float32"``: Keras 3 has names for types, Keras 2 TensorFlow's own."""
    import tensorflow as tf

    name: str = tf.as_dtype(tensor.dtype).name
    return name


def is_concrete_function(value: Any) -> bool:
    """Whether ``value`` is a traced tf.function."""
    return (
        hasattr(value, "graph") and hasattr(value, "captured_inputs") and hasattr(value, "structured_outputs")
    )


def untraced_copy(function: Any) -> Any:
    """A ``tf.function`` with the settings of ``function`` (input_signature and so on), not traced yet."""
    return function._clone(None)


def compiles_with_xla(function: Any) -> bool:
    """Whether a ``tf.function`` was made with ``jit_compile=True``."""
    return bool(getattr(function, "_jit_compile", None))


def synchronize(outputs: Any) -> None:
    """Waits until all tensors of a nest are computed (a GPU runs behind the Python program).

    Where there are none, until all devices are done.
    """
    import tensorflow as tf

    tensors = [value for value in tf.nest.flatten(outputs) if hasattr(value, "numpy")]
    for tensor in tensors:
        tensor.numpy()
    if not tensors and tf.executing_eagerly():
        tf.test.experimental.sync_devices()


def shapes_of(values: Any) -> tuple[tuple[int, tuple[int | None, ...]], ...]:
    """(number of the dtype, shape) of every tensor and array in a nest, each once."""
    import tensorflow as tf

    flat = tf.nest.flatten(values, expand_composites=True)
    tensors = [value for value in flat if hasattr(value, "shape") and hasattr(value, "dtype")]
    found = [(tf.as_dtype(t.dtype), tf.TensorShape(t.shape)) for t in tensors]
    return tuple({(d.as_datatype_enum, tuple(s.as_list())): None for d, s in found if s.rank is not None})


def is_iterator(value: Any) -> bool:
    """Whether ``value`` hands out the elements of a ``tf.data.Dataset`` on one device."""
    import tensorflow as tf

    return isinstance(value, tf.data.Iterator)


def take(iterator: Any, count: int) -> list[Any]:
    """Up to ``count`` elements; fewer where the data end."""
    return [element for _, element in zip(range(count), iterator, strict=False)]


def iterator_over(elements: list[Any], like: Any) -> Any:
    """An iterator over ``elements`` that functions traced for the iterator ``like`` accept as it is.

    The public ``iter(dataset)`` would have the elements' own, more precise shapes: another trace.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops

    dataset = tf.data.Dataset.from_tensors(elements[0])
    for element in elements[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(element))
    inner = iter(dataset)
    out = iterator_ops.OwnedIterator(components=[inner._iterator_resource], element_spec=like.element_spec)
    out._ooo_inner = inner  # keeps the dataset alive
    return out
