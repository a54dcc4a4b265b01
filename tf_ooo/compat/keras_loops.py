"""Runs the time steps of recurrent layers in several while loops instead of one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.compat import keras_values
from tf_ooo.compat import keras_layers, versions

if TYPE_CHECKING:
    import keras

# Each part of a loop has at least this many time steps: starting a loop costs as much as a few.
_LEAST_STEPS = 4
_PATCHING = threading.RLock()


def loops(model: keras.Model) -> list[str]:
    """Return the titles of the recurrent layers whose loop can be split: not unrolled, of Keras 3."""
    if versions.is_of_keras_2(model):
        return []
    return [keras_layers.title_of(layer) for layer in keras_layers.recurrent(model) if not layer.unroll]


@contextlib.contextmanager
def in_parts(count: int) -> Iterator[None]:
    """Make recurrent layers that this thread calls in the block run their time steps in ``count`` loops.

    The values are those of one loop, except for the order in which weights' gradients are added up.  Weights
    are read before the loops, not in each time step: one on another device is sent once.  A layer keeps one
    loop if its number of time steps is unknown when it is traced or too small, if its inputs are nested, or
    if cuDNN runs it.
    """
    if count < 2:
        yield
        return
    import keras
    from keras.src import backend

    thread = threading.get_ident()
    with _PATCHING:
        whole, layers_loop = backend.rnn, keras.layers.RNN.inner_loop
        signature = inspect.signature(whole)

        @functools.wraps(whole)
        def parted(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if threading.get_ident() != thread or not _may_be_parted(given.arguments, count):
                return whole(*args, **kwargs)
            return _parted(whole, given.arguments, count)

        @functools.wraps(layers_loop)
        def reading_before(layer: Any, *args: Any, **kwargs: Any) -> Any:
            ours = threading.get_ident() == thread
            weights = getattr(layer.cell, "trainable_variables", [])  # a cell need be no layer
            with _read_already(weights if ours else []):
                return layers_loop(layer, *args, **kwargs)

        backend.rnn, keras.layers.RNN.inner_loop = parted, reading_before
        try:
            yield
        finally:
            backend.rnn, keras.layers.RNN.inner_loop = whole, layers_loop


@contextlib.contextmanager
def _read_already(weights: Sequence[Any]) -> Iterator[None]:
    """Replace each weight inside the block by a tensor, its value read here."""
    variables = list(map(keras_values.variable_of_keras, weights))
    for weight, variable in zip(weights, variables, strict=True):
        keras_values.set_variable_of_keras(weight, tf.convert_to_tensor(variable))
    try:
        yield
    finally:
        for weight, variable in zip(weights, variables, strict=True):
            keras_values.set_variable_of_keras(weight, variable)


def _may_be_parted(given: dict[str, Any], count: int) -> bool:
    inputs = given["inputs"]
    # Keras' own layers have rows first, and never give the number of time steps as a tensor.
    is_other = given["unroll"] or given["time_major"] or tf.is_tensor(given["input_length"])
    return not is_other and tf.is_tensor(inputs) and (inputs.shape[1] or 0) >= count * _LEAST_STEPS


def _parted(whole: Callable[..., Any], given: dict[str, Any], count: int) -> Any:
    """Run ``whole`` part by part and return what it returns: (last output, outputs, states)."""
    inputs, mask, states = given["inputs"], given["mask"], given["initial_states"]
    if given["go_backwards"]:  # outputs are in the order in which they are computed
        inputs = tf.reverse(inputs, [1])
        mask = mask if mask is None else tf.reverse(mask, [1])
    ends = [inputs.shape[1] * number // count for number in range(count + 1)]
    last: Any = None
    parts: list[Any] = []
    for begin, end in zip(ends, ends[1:], strict=False):
        masked = mask if mask is None else mask[:, begin:end]
        part = {"inputs": inputs[:, begin:end], "mask": masked, "initial_states": states}
        output, outputs, states = whole(**{**given, **part, "go_backwards": False, "input_length": None})
        if last is not None and masked is not None and not given["zero_output_for_mask"]:
            output, outputs = _kept(last, output, outputs, masked, given["return_all_outputs"])
        last, parts = output, [*parts, outputs]
    return last, tf.concat(parts, 1) if given["return_all_outputs"] else parts[-1], states


def _kept(last: Any, output: Any, outputs: Any, mask: Any, all_outputs: bool) -> tuple[Any, Any]:
    """Keep the ``last`` output through the masked time steps at the beginning of a part."""
    flags = tf.cast(mask if len(mask.shape) == 2 else tf.squeeze(mask, -1), tf.int32)
    seen = tf.cumsum(flags, axis=1) > 0
    output = tf.where(_broadcast(seen[:, -1], output), output, last)
    if not all_outputs:
        return output, tf.expand_dims(output, 1)
    return output, tf.where(_broadcast(seen, outputs), outputs, tf.expand_dims(last, 1))


def _broadcast(flags: Any, tensor: tf.Tensor) -> Any:
    """Append dimensions of size 1, up to the tensor's rank."""
    for _ in range(len(tensor.shape) - len(flags.shape)):
        flags = tf.expand_dims(flags, -1)
    return flags
