"""A fit trains the weights that were trainable when stock Keras would have traced its step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import func_graphs, keras_compiled, keras_layers, keras_variables, tf_functions, versions

if TYPE_CHECKING:
    import keras

_KNOWN = "_ooo_trainable"
Flags = list[tuple[Any, str, bool]]


@dataclass(frozen=True)
class _Traced:
    """Keeps the inputs of the first trace; not a tuple, whose items Keras would save and load with the model.

    ``function`` is stock Keras' train function then.
    """

    function: Any
    flags: Flags
    optimizer: Any


def as_first_traced(model: keras.Model, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step`` with the weights that stock training trains.

    Keras keeps its traced train function until the model is compiled again: a layer that is frozen, or
    thawed, after the first step trains on as before.  Each of our traces of the step does as that one.
    """

    @functools.wraps(train_step)
    def called(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():  # each step is as if it were traced
            return train_step(*args, **kwargs)
        flags = _flags_of(model)
        optimizer = getattr(model, "optimizer", None)
        object.__setattr__(model, _KNOWN, _Traced(_stock_function(model), flags, optimizer))
        with _set(flags):
            return train_step(*args, **kwargs)

    return called


def as_first_fit(
    model: keras.Model, own_step: Callable[..., Any], first_step: Callable[..., Any]
) -> Callable[..., Any]:
    """``first_step``, as :func:`as_first_traced` gives it, with the first trace's optimizer, within ``fit``.

    ``own_step`` as it is elsewhere: ``train_on_batch`` has Keras trace the step for its own batches.
    """

    @functools.wraps(own_step)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not func_graphs.is_within_another():
            return own_step(*args, **kwargs)
        traced = _first_trace_of(model)
        if traced is None:
            return first_step(*args, **kwargs)
        with keras_layers.shadowed(model, "optimizer", traced.optimizer):
            return first_step(*args, **kwargs)

    return called


def trained_variables(model: keras.Model) -> list[Any]:
    """The variables that are trainable in each trace of the step, or would be if it were traced now."""
    with _set(_flags_of(model)):
        return list(model.trainable_variables)


def _flags_of(model: keras.Model) -> Flags:
    """The flags with which the step was first traced since the model was compiled; today's if it was not."""
    if (traced := _first_trace_of(model)) is not None:
        return traced.flags
    flags = [(layer, "_trainable", bool(layer._trainable)) for layer in keras_layers.parts_of(model)]
    if not versions.is_of_keras_2(model):
        flags += [(variable, "trainable", bool(variable.trainable)) for variable in model.weights]
    written = _written_by_stock(model)
    return flags if written is None else _as_traced(model, flags, written)


def _first_trace_of(model: keras.Model) -> _Traced | None:
    """Return our notes of the step's first trace; None: there was none since the model was compiled."""
    traced: _Traced | None = vars(model).get(_KNOWN)
    function = None if traced is None else traced.function
    return traced if function is not None and function is _stock_function(model) else None


def _written_by_stock(model: keras.Model) -> set[int] | None:
    """The ``id`` of each handle that stock Keras' own traced step writes to; None: it has traced none."""
    stock = _stock_function(model)
    traced = None if stock is None or versions.is_of_keras_2(model) else tf_functions.step_of_fit(stock)
    return None if traced is None else func_graphs.written_by(traced.graph)


def other_optimizer(model: keras.Model) -> bool:
    """Return whether the model has been given another optimizer since its step was first traced.

    Until it is compiled again stock Keras goes on with the one that was there then.
    """
    if (traced := _first_trace_of(model)) is not None:
        return traced.optimizer is not getattr(model, "optimizer", None)
    written = _written_by_stock(model)
    if written is None or _known_to_optimizer(model) is None:  # the latter is known of Keras 3 only
        return False
    weights, state = (
        {id(keras_variables.handle_of(v)) for v in variables} & written
        for variables in (model.weights, keras_compiled.state_of(model.optimizer))
    )
    return bool(weights) and not state


def _stock_function(model: keras.Model) -> Any:
    """Keras' own train function, also while another stands in its place; None where there is none yet."""
    installed = getattr(vars(model).get("make_train_function"), "ooo", None)
    return model.train_function if installed is None else installed[1]


def _as_traced(model: keras.Model, flags: Flags, written: set[int]) -> Flags:
    """The flags of weights that a traced step writes to, by the ``id`` of their handles, and of their layers.

    A weight that its layer assigns by itself is not trained by that: the optimizer does not know it.
    """
    changed = {id(v) for v in model.weights if id(keras_variables.handle_of(v)) in written}
    trained = changed if (known := _known_to_optimizer(model)) is None else changed & known
    layers = keras_layers.parts_of(model)
    may_train = {id(v) for layer in layers for v in keras_variables.made_trainable(layer)}

    def was_trainable(owner: Any, name: str, value: bool) -> bool:
        if name == "trainable":
            return id(owner) in trained if id(owner) in may_train else value
        weights = {id(variable) for variable in owner.weights}
        if weights & may_train:
            return bool(weights & trained)
        # BatchNormalization(center=False, scale=False): its averages move while it is trainable.
        return bool(weights & changed) if weights else value

    return [(owner, name, was_trainable(owner, name, value)) for owner, name, value in flags]


def _known_to_optimizer(model: keras.Model) -> set[int] | None:
    """Return the ``id`` of each variable that Keras' own step updates; None: the step is another's."""
    optimizer = getattr(model, "optimizer", None)
    own_step = type(model).train_step is not versions.keras_of(model).Model.train_step
    if own_step or not keras_compiled.is_optimizer(optimizer):
        return None
    optimizers = [optimizer, *keras_compiled.inner_optimizers(optimizer)]
    return {id(v) for each in optimizers for v in keras_variables.made_trainable(each)}


@contextlib.contextmanager
def _set(flags: Flags) -> Iterator[None]:
    """Inside the block layers and variables have these flags."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in flags]
    changes = [old[2] for old in before] != [new[2] for new in flags]
    try:
        _put(flags if changes else [])
        yield
    finally:
        _put(before if changes else [])


def _put(flags: Flags) -> None:
    for owner, name, value in flags:
        if name == "_trainable":
            object.__setattr__(owner, name, value)
        else:
            owner.trainable = value
