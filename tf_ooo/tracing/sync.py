"""State that all ranks share: weights and optimizers at the start, logs as an epoch or evaluation ends."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_compiled, keras_fits, keras_layers, nests, tf_functions, train_function
from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine, naming_the_lost

if TYPE_CHECKING:
    import keras


def numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of logs that are numbers."""
    out = {}
    for key, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            out[key] = float(value)
    return out


def average_evaluation(engine: Engine, model: keras.Model) -> None:
    """The evaluation that begins ends with logs averaged over all ranks, weighted by samples."""
    callbacks = keras_fits.running_callback_list()
    if engine.size == 1 or callbacks is None:
        return
    own = callbacks.on_test_end

    def on_test_end(logs: dict[str, Any] | None = None) -> None:
        keras_layers.set_on(callbacks, "on_test_end", None)
        logs = {} if logs is None else logs
        with naming_the_lost(engine, "at the end of an evaluation"):
            replies = engine.gather([numbers_of(logs), keras_fits.samples_seen(model)])
        logs.update(average_logs(*zip(*replies, strict=True)))
        own(logs)

    keras_layers.set_on(callbacks, "on_test_end", on_test_end)


def build(model: keras.Model, optimizers: Sequence[Any], train_step: Any, iterator: Any) -> None:
    """Creates all variables of the model and its optimizers; no step runs.

    What cannot be built directly is built by tracing a step that is thrown away: an optimizer has slots for
    what its first update is given, which only Keras' own train_step tells.
    """
    if train_function.has_kerass_train_step(model):
        build_optimizer(model)
    if model.built and all(map(keras_compiled.is_built, optimizers)):
        return
    if model.run_eagerly and model.weights:
        return
    step = tf_functions.undecorated(train_step)  # whose trace would stay, and average nothing
    try:
        tf_functions.concrete_function(lambda data: step(data), [iterator.element_spec])
    except Exception as error:
        if not model.run_eagerly:
            raise
        raise BackendError(
            "the model has no weights before its first step, its train_step cannot be traced to make them "
            f"({type(error).__name__}); build the model before fit, or compile it with run_eagerly=False"
        ) from error


def build_optimizer(model: keras.Model) -> None:
    """Creates the variables of the model's optimizer, for all weights, if the model has its own."""
    main: Any = getattr(model, "optimizer", None)
    if (
        keras_layers.is_wholly_built(model)
        and keras_compiled.is_optimizer(main)
        and not keras_compiled.is_built(main)
        and model.trainable_weights
    ):
        keras_compiled.build_optimizer(main, model.trainable_weights)


def common_spec(engine: Engine, spec: object) -> Any:
    """Return what all ranks' batches share; a dimension that differs (rows of uneven data) is open."""
    flat = tf.nest.flatten(spec)
    plain = all(isinstance(part, tf.TensorSpec) for part in flat)
    mine = [None if part.shape.rank is None else part.shape.as_list() for part in flat] if plain else None
    everyone = engine.gather(mine)
    if any(theirs is None or len(theirs) != len(flat) for theirs in everyone):
        return spec
    shapes = [_common(ones) for ones in zip(*everyone, strict=True)]
    specs = [tf.TensorSpec(shape, part.dtype, part.name) for shape, part in zip(shapes, flat, strict=True)]
    return tf.nest.pack_sequence_as(spec, specs)


def _common(shapes: Sequence[list[int | None] | None]) -> list[int | None] | None:
    first = shapes[0]
    if first is None or any(shape is None or len(shape) != len(first) for shape in shapes):
        return None
    return [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]


def shared_variables(model: keras.Model, optimizers: Sequence[Any]) -> list[Any]:
    """Return weights and optimizer state, each once.  Random seeds stay each rank's own."""
    states = [variable for optimizer in optimizers for variable in keras_compiled.state_of(optimizer)]
    return nests.each_once([*model.weights, *states])


def broadcast_state(engine: Engine, variables: Sequence[Any]) -> None:
    """Gives the variables of every rank the values of rank 0."""
    if engine.size == 1:
        return
    values = engine.broadcast([variable.numpy() for variable in variables])
    if engine.rank != 0:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def checksum(variables: Sequence[Any]) -> int:
    """Return one number for the bits of all values."""
    total = 0
    for variable in variables:
        total = zlib.crc32(variable.numpy().tobytes(), total)
    return total


def average_logs(everyone: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """The mean of each entry over the ranks that have it.

    Args:
        everyone: the logs of each rank.
        weights: samples behind each rank's logs; if all are 0, every rank counts the same.
    """
    if not sum(weights):
        weights = [1.0] * len(everyone)
    out = {}
    for key in dict.fromkeys(key for logs in everyone for key in logs):
        pairs = [
            (logs[key], weight)
            for logs, weight in zip(everyone, weights, strict=True)
            if key in logs and weight
        ]
        total = sum(weight for _, weight in pairs)
        out[key] = math.fsum(value * weight for value, weight in pairs) / total if total else math.nan
    return out
