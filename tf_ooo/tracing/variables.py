"""Keeps the state of a fit: variables of the model and its optimizers, where they are, what ranks share."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import (
    keras_compiled,
    keras_fits,
    keras_layers,
    keras_variables,
    nests,
    tf_functions,
    train_function,
)
from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine, naming_the_lost

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_renewed: weakref.WeakSet[Any] = weakref.WeakSet()


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return every Keras optimizer that the model, a part of it or a loss-scaling optimizer holds, once."""
    held: dict[int, Any] = {}
    seen: set[int] = set()
    inside: dict[tuple[type, type], Callable[[Any], Iterable[Any]] | None] = {}
    waiting = keras_layers.parts_of(model)[::-1]
    while waiting:
        value = waiting.pop()
        kind = type(value), value.__class__  # the latter is what a proxy stands for
        if kind not in inside:  # a model has thousands of values of some sixty types
            inside[kind] = _inside(value)
        values_in = inside[kind]
        if values_in is None or id(value) in seen:
            continue
        seen.add(id(value))
        if values_in is keras_compiled.inner_optimizers:
            held[id(value)] = value
        waiting.extend([*values_in(value)][::-1])
    return list(held.values())


def _inside(value: object) -> Callable[[Any], Iterable[Any]] | None:
    """Return the function that lists what such a value holds; None if no optimizer can be in it."""
    if keras_compiled.is_optimizer(value):
        return keras_compiled.inner_optimizers
    if keras_layers.is_layer(value):
        return keras_layers.attributes_of
    if isinstance(value, dict):
        return operator.methodcaller("values")
    return iter if isinstance(value, (list, tuple)) else None


def all_variables(model: keras.Model) -> list[Any]:
    """Return the weights, states, metrics and optimizers' variables of a model, each once."""
    optimizers = optimizers_of(model)
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    states = [variable for optimizer in optimizers for variable in keras_compiled.state_of(optimizer)]
    return nests.each_once([*model.variables, *metrics, *states])


def values_of(variables: Iterable[Any]) -> list[Any]:
    """Return the ``tf.Variable`` behind each variable; None where there is none."""
    return [*map(keras_variables.value_of, variables)]


def key_of(variable: keras.Variable) -> int:
    """Return the ``id`` of a Keras variable's handle as its key; 0 if it has no ``tf.Variable``."""
    value = keras_variables.value_of(variable)
    return 0 if value is None else id(value.handle)


def bytes_of(variables: Iterable[Any]) -> int:
    """Return the bytes of all values together; those without a size, such as strings, are left out."""
    values = [value for value in values_of(variables) if value is not None]
    sizes = [(value.shape.num_elements(), value.dtype.size) for value in values]
    return sum(count * each for count, each in sizes if count is not None and each is not None)


class Moved:
    """Holds Keras variables that are on other devices until :meth:`restore`.

    Each gets a new ``tf.Variable`` while the old one waits.  Functions traced with the old ones (evaluate,
    predict) are put away, also those of models within the model.  A new one is empty after :meth:`restore`,
    and the next :meth:`move` to the same device fills it: functions traced with it stay right.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._before: list[tuple[Any, Any]] = []
        self._copies: dict[int, tuple[Any, Any, str, Any]] = {}  # by id: variable, old, device asked for, new
        self._functions: list[tuple[Any, dict[str, Any]]] | None = None

    def move(self, devices: Mapping[int, str], variables: Iterable[Any]) -> None:
        """Move variables; ``devices`` are full names by the id of the Keras variable."""
        if self._functions is None:
            self._functions = [
                (part, train_function.functions_of(part)) for part in keras_layers.parts_of(self.model)
            ]
            for part, functions in self._functions:
                train_function.set_functions_of(part, dict.fromkeys(functions))
            self._forget_traces()
        for variable in variables:
            old, device = keras_variables.value_of(variable), devices.get(id(variable))
            if device is None or old is None or old.device == device:
                continue
            new = self._copy(variable, old, device)
            self._before.append((variable, old))
            keras_variables.set_value_of(variable, new)

    def _copy(self, variable: keras.Variable, old: Any, device: str) -> Any:
        """Return the copy from the last move, filled; a new one if that was of another variable or device.

        The device that was asked for counts: some types of numbers are never on a GPU.
        """
        _, before, place, new = self._copies.get(id(variable), (None, None, "", None))
        if before is old and place == device:
            keras_variables.fill(new, old.read_value())
            return new
        new = keras_variables.copy_on(device, old)
        self._copies[id(variable)] = variable, old, device, new
        return new

    def put_away(self, name: str) -> Any:
        """Return the model's function of this name from before the move; None if it had none."""
        own = (functions for part, functions in self._functions or () if part is self.model)
        return next(own, {}).get(name)

    @property
    def replaced(self) -> dict[int, Any]:
        """Return the present ``tf.Variable`` for each that waits, by the ``id`` of the old one's handle."""
        return {id(old.handle): keras_variables.value_of(variable) for variable, old in self._before}

    def check_captures(self, captures: Iterable[Any]) -> None:
        """Raise BackendError if a traced function reads a variable that has been moved away."""
        handles = {id(old.handle): variable for variable, old in self._before}
        for capture in captures:
            if id(capture) in handles:
                path = keras_variables.path_of(handles[id(capture)])
                raise BackendError(
                    f"{path} is used in a tf.function that was traced before the variables were moved, and "
                    "would not be trained; leave that tf.function away: the whole step is one"
                )

    def restore(self, reachable: Callable[[str], bool] = lambda device: True) -> list[str]:
        """Put the variables back with their present values; return the names of those whose device is gone.

        Those keep their values from before: TensorFlow would wait for ever for devices not ``reachable``.
        """
        lost = []
        gone: set[str] = set()
        while self._before:  # restored ones leave it, so that an interrupted call may be repeated
            variable, old = self._before[-1]
            moved = keras_variables.value_of(variable)
            taken = _taken(variable, old, reachable, gone)
            keras_variables.set_value_of(variable, old)
            self._before.pop()
            if not taken:
                lost.append(keras_variables.path_of(variable))
            if not (taken and free(moved)) and _host(moved.device) != _host(old.device):
                gone.add(moved.device)  # a second read from there would wait for ever
        for part, functions in self._functions or ():
            # A function that Keras has made but not traced reads no variable: it stays, as in stock training.
            made = train_function.functions_of(part)
            made = {name: function if _is_untraced(function) else None for name, function in made.items()}
            before = {name: function for name, function in functions.items() if function is not None}
            train_function.set_functions_of(part, made | before)
        self._forget_traces()
        self._functions = None
        return lost

    def _forget_traces(self) -> None:
        parts = [part for part, _ in self._functions or ()]
        for owner in (*parts, *optimizers_of(self.model), *self.model.metrics):
            tf_functions.forget_traces(owner)


def _is_untraced(function: Any) -> bool:
    """Return whether a function surely has no trace; False if it cannot be looked into."""
    found = tf_functions.functions_of(function)
    return bool(found) and not any(each.experimental_get_tracing_count() for each in found)


def _taken(variable: keras.Variable, old: Any, reachable: Callable[[str], bool], gone: set[str]) -> bool:
    """Return whether ``old`` has taken the variable's value; devices in ``gone`` are not read."""
    moved = keras_variables.value_of(variable)
    if moved.device in gone or not reachable(moved.device):
        return False
    try:
        old.assign(moved.read_value())
        return True
    except Exception as error:  # a worker that has died: nothing else may stop this
        _LOG.debug("%s is lost", keras_variables.path_of(variable), exc_info=error)
        return False


def free(moved: Any) -> bool:
    """Free the memory of a ``tf.Variable``; return whether its device was there."""
    try:
        keras_variables.empty(moved)
        return True
    except Exception as error:  # its memory is taken a while longer
        _LOG.debug("memory of %s was not freed", moved.name, exc_info=error)
        return False


def _host(device: str) -> str:
    return device.partition("/device:")[0]


def renew(model: keras.Model) -> None:
    """Give a model's variables new ``tf.Variable``s with the same values, once, and forget its functions.

    After TensorFlow has joined a cluster, traced functions lose updates of some older variables (2.21: Keras'
    count of an optimizer's steps stays 0); variables made since are right.
    """
    if model in _renewed:
        return
    for variable in all_variables(model):
        old = keras_variables.value_of(variable)
        if old is not None:
            keras_variables.set_value_of(variable, keras_variables.copy_on(old.device, old))
    model.train_function = None
    for part in keras_layers.parts_of(model):
        train_function.set_functions_of(part, dict.fromkeys(train_function.functions_of(part)))
        tf_functions.forget_traces(part)
    _renewed.add(model)


def names_by_handle(variables: Iterable[Any]) -> dict[int, str]:
    """Return names of variables by the id of their handle in the graph being traced."""
    graph = tf.compat.v1.get_default_graph()
    inside = {id(external): placeholder for external, placeholder in graph.captures}
    names = {}
    for variable in variables:
        handle = keras_variables.handle_of(variable)
        if handle is not None and id(handle) in inside:
            names[id(inside[id(handle)])] = keras_variables.path_of(variable)
    return names


def numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of logs that are numbers."""
    out = {}
    for key, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            out[key] = float(value)
    return out


def average_evaluation(engine: Engine, model: keras.Model) -> None:
    """Make the evaluation that begins end with logs averaged over all ranks, weighted by samples."""
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
    """Create all variables of the model and its optimizers; no step runs.

    If that cannot be done directly, a step is traced and thrown away: an optimizer has slots for what its
    first update is given, which only Keras' own train_step tells.
    """
    if train_function.has_kerass_train_step(model):
        build_optimizer(model)
    if model.built and all(map(keras_compiled.is_built, optimizers)):
        return
    if model.run_eagerly and model.weights:
        return
    step = tf_functions.undecorated(train_step)  # its trace would stay, and average nothing
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
    """Create the variables of the model's optimizer, for all weights, if the model has its own."""
    main: Any = getattr(model, "optimizer", None)
    if (
        keras_layers.is_wholly_built(model)
        and keras_compiled.is_optimizer(main)
        and not keras_compiled.is_built(main)
        and model.trainable_weights
    ):
        keras_compiled.build_optimizer(main, model.trainable_weights)


def common_spec(engine: Engine, spec: object) -> Any:
    """Return the spec that all ranks' batches share; a dimension that differs (uneven rows) is open."""
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
    """Return weights and optimizer state, each once; random seeds stay each rank's own."""
    states = [variable for optimizer in optimizers for variable in keras_compiled.state_of(optimizer)]
    return nests.each_once([*model.weights, *states])


def broadcast_state(engine: Engine, variables: Sequence[Any]) -> None:
    """Give the variables of every rank the values of rank 0."""
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
    """Return the mean of each entry over the ranks that have it.

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
