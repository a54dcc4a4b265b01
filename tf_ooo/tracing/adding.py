"""Finds what an assignment adds to a variable, as far as the ops of a graph tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_ooo.tracing.of_data import DRAWN

if TYPE_CHECKING:
    import tensorflow as tf

_PASSES_ON = ("Cast", "Identity", "Reshape")
_ADDS = ("Add", "AddV2", "Sub")


def what_is_added(value: Any, sign: int, handle: tf.Tensor) -> list[Any]:
    """Return what is added to a variable, or subtracted; [] where its value is computed otherwise.

    ``value``, ``sign``: as an assignment that is intercepted gives them; ``handle``: the variable's.
    """
    if sign:
        return [value]
    if value.op.type not in _ADDS:
        return []
    first, second = map(_source, value.op.inputs)
    pairs = [(first, second)] if value.op.type == "Sub" else [(first, second), (second, first)]
    return [added for before, added in pairs if _is_read(before, handle)]


def _source(tensor: tf.Tensor) -> Any:
    while tensor.op.type in _PASSES_ON:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_read(tensor: tf.Tensor, handle: tf.Tensor) -> bool:
    return tensor.op.type == "ReadVariableOp" and tensor.op.inputs[0] is handle


def feeds_random_numbers(state: Any) -> bool:
    """Return whether random numbers are drawn by whole numbers computed from a tensor, or a handle."""
    seen, waiting = set[int](), [] if state is None else [state]
    while waiting:
        for op in waiting.pop().consumers():
            if DRAWN.search(op.type):
                return True
            if id(op) not in seen:
                seen.add(id(op))
                waiting.extend(output for output in op.outputs if output.dtype.is_integer)
    return False
