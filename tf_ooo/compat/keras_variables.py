"""Handles variables: the ``tf.Variable`` behind Keras', its handle and device, and reads in a trace."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as _Resource
from tensorflow.python.ops.resource_variable_ops import ResourceVariable as _Plain

from grappler_passes.compat import keras_values

if TYPE_CHECKING:
    import keras


VariableT = TypeVar("VariableT")

_TWIN = "_ooo_value"
_IN_HOST_MEMORY = "_ooo_in_host_memory"


def path_of(variable: keras.Variable) -> str:
    """Return the name of a Keras or TensorFlow variable."""
    return str(keras_values.path_of_keras(variable) or variable.name)


def unique_name_of(variable: keras.Variable) -> str:
    """Return the name of a ``tf.Variable`` with its own number, since many are named ``Variable``."""
    return str(variable._unique_id)


def named(variables: Sequence[VariableT]) -> dict[str, VariableT]:
    """Return Keras variables by a unique name: the path, and a number if several share one."""
    by_name: dict[str, VariableT] = {}
    for variable in variables:
        path = path_of(variable)
        names = itertools.chain([path], (f"{path}#{number}" for number in itertools.count(1)))
        by_name[next(name for name in names if name not in by_name)] = variable
    return by_name


def is_overwritten_with_gradient(variable: keras.Variable) -> bool:
    """Return whether an optimizer assigns the gradient to the variable instead of taking a step along it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def made_trainable(owner: Any) -> list[Any]:
    """Return the weights that a layer made as trainable, or that an optimizer was built for."""
    return list(owner._trainable_variables)


def value_of(variable: keras.Variable) -> Any:
    """Return the ``tf.Variable`` behind a Keras variable.

    Layers of Keras 2 hold the ``tf.Variable`` itself; a twin with the same handle then stands behind it.
    """
    own = _resource(variable)
    if own is None:
        return keras_values.variable_of_keras(variable)
    twin = getattr(own, _TWIN, None)
    if twin is None:
        twin = object.__new__(type(own))
        vars(twin).update(vars(own))
        vars(own)[_TWIN] = twin
    return twin


def set_value_of(variable: keras.Variable, value: Any) -> None:
    """Put another ``tf.Variable`` behind a Keras variable."""
    own = _resource(variable)
    if own is None:
        keras_values.set_variable_of_keras(variable, value)
        return
    own._handle = value._handle
    vars(own)[_TWIN] = value


def _resource(variable: keras.Variable) -> Any:
    """Return the ``tf.Variable`` that a Keras 2 variable is, or wraps if mixed; None for Keras 3."""
    if not isinstance(variable, tf.Variable):
        return None
    return vars(variable).get("_variable", variable)


def handle_of(variable: keras.Variable) -> Any:
    """Return a variable's handle as ops of the present graph get it; None if there is none."""
    own = _resource(variable)
    return getattr(getattr(variable, "value", None) if own is None else own, "handle", None)


def copy_on(device: str, variable: keras.Variable) -> Any:
    """Return a new ``tf.Variable`` on a device, with another one's value and identity."""
    with tf.init_scope(), tf.device(device):
        new = tf.Variable(
            variable.read_value(),
            trainable=variable.trainable,
            dtype=variable.dtype,
            shape=variable.shape,
            name=variable.name.split(":")[0],
            synchronization=variable.synchronization,
            aggregation=variable.aggregation,
        )
    new._unique_id = variable._unique_id
    if is_in_host_memory(variable):
        mark_in_host_memory(new)
    return new


def mark_in_host_memory(variable: keras.Variable) -> None:
    """Mark a variable for :func:`is_in_host_memory`: a ``tf.Variable`` says where it is, not why."""
    setattr(variable, _IN_HOST_MEMORY, True)


def is_in_host_memory(variable: keras.Variable) -> bool:
    """Return whether the variable, or the one it was copied from, was marked."""
    return bool(getattr(variable, _IN_HOST_MEMORY, False))


def empty(variable: keras.Variable) -> None:
    """Free the memory of a ``tf.Variable`` that nobody needs any more.

    TensorFlow keeps graphs of gradients with a custom gradient (Keras' optimizers trace these), and the
    variables that they read, as long as the process lives.
    """
    with tf.init_scope(), tf.device(variable.device):
        nothing = tf.constant([], variable.dtype)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)


def fill(variable: keras.Variable, value: Any) -> None:
    """Undo :func:`empty`: functions traced with the variable find this value."""
    with tf.init_scope(), tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def register(dtype: object, shape: Sequence[int | None] | None, device: str) -> Any:
    """Return an empty variable for values of a shape with open sizes.

    Functions that use it must be traced for any number of rows: graph optimizers give a variable of unknown
    shape the shape of what is assigned to it, even for earlier batches.
    """
    sizes = [size or 0 for size in shape or (0,)] if shape != () else []
    return zeros_on(device, dtype, sizes, shape=tf.TensorShape(None), validate_shape=False)


def zeros_on(device: str, dtype: object, sizes: Sequence[int | None] | None, **options: Any) -> Any:
    """Return an untrained variable of zeros, which are made in this process; all sizes are known.

    The result of an op on a worker has no shape until the worker answers, and a new variable asks for the
    shape: once the worker is lost, it waits for ever (2.21).
    """
    with tf.init_scope():
        with tf.device(None):
            zeros = tf.zeros(sizes, dtype)
        with tf.device(device):
            return tf.Variable(zeros, trainable=False, **options)


# The value is added with this sign; ``assign`` adds nothing.
_SIGNS = {"assign": 0, "assign_add": 1, "assign_sub": -1}
# _Plain overrides methods of _Resource.
_KINDS = (_Resource, _Plain)


@contextlib.contextmanager
def reads_on_own_device() -> Iterator[None]:
    """Make ops traced inside the block read variables through ops on their own device.

    A ReadVariableOp is on its variable's device.  TensorFlow's graph optimizers change how sums and products
    associate, but not around an input from another device: bits would depend on where variables are.  They
    remove an Identity, but keep a PlaceholderWithDefault.  This also covers branches of conditions
    (accumulated gradients), which are graphs of their own.
    """
    read = _Resource._read_variable_op
    here = threading.get_ident()

    def read_and_pass_on(variable: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        value = read(variable, *args, **kwargs)
        if tf.executing_eagerly() or threading.get_ident() != here:
            return value
        return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)

    _Resource._read_variable_op = read_and_pass_on
    try:
        yield
    finally:
        _Resource._read_variable_op = read


@contextlib.contextmanager
def intercepted(on_read: Callable[[Any], Any], on_assign: Callable[[Any, Any, int], bool]) -> Iterator[None]:
    """Ask before this thread's traces read or assign a variable inside the block.

    ``on_read`` returns a value to use instead of the variable's own, or None.  ``on_assign`` is given the
    variable, the tensor, and 1 or -1 if it is added or subtracted, else 0; if it returns True it takes the
    tensor, and nothing is assigned.  Scattered updates are not asked about.
    """
    here, own_read = threading.get_ident(), _Resource._read_variable_op
    own = [(kind, name, vars(kind)[name]) for kind in _KINDS for name in _SIGNS if name in vars(kind)]

    def asked() -> bool:
        return not tf.executing_eagerly() and threading.get_ident() == here

    def read(variable: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        value = on_read(variable) if asked() else None
        return own_read(variable, *args, **kwargs) if value is None else value

    def asking(method: Any, sign: int) -> Any:
        @functools.wraps(method)
        def assign(
            variable: tf.Variable,
            value: Any,
            use_locking: Any = None,
            name: Any = None,
            read_value: bool = True,
        ) -> Any:
            if asked():
                value = tf.convert_to_tensor(value, variable.dtype)
                if on_assign(variable, value, sign):
                    return variable if read_value else tf.no_op()
            return method(variable, value, use_locking, name, read_value)

        return assign

    _Resource._read_variable_op = read
    for kind, each, method in own:
        setattr(kind, each, asking(method, _SIGNS[each]))
    try:
        yield
    finally:
        _Resource._read_variable_op = own_read
        for kind, each, method in own:
            setattr(kind, each, method)
