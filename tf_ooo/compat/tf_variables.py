"""Reads and assignments of variables in functions that are being traced."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as _Resource
from tensorflow.python.ops.resource_variable_ops import ResourceVariable as _Plain

# The value is added with this sign; ``assign`` adds nothing.
_SIGNS = {"assign": 0, "assign_add": 1, "assign_sub": -1}
# The second has methods of its own around the first one's.
_KINDS = (_Resource, _Plain)


@contextlib.contextmanager
def reads_on_own_device() -> Iterator[None]:
    """Ops that are traced inside the block get what they read of variables from ops on their own device.

    A ReadVariableOp is on its variable's device.  TensorFlow's graph optimizers change how sums and products
    associate, but not around an input that comes from another device: bits would depend on where variables
    are.  They take away an Identity, a PlaceholderWithDefault they leave.  In branches of conditions, too
    (gradients that are accumulated), which are graphs of their own.
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
    """Inside the block this thread's traces ask before a variable is read or assigned.

    ``on_read`` gives the value to take in the place of a variable's own, or None.  ``on_assign`` is given the
    variable, the tensor, and 1 or -1 where it is added or subtracted, else 0; True: it takes the tensor, and
    nothing is assigned.  Scattered updates are not asked about.
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
