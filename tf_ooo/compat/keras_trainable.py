"""Which weights a fit trains: those that were trainable when stock Keras would have traced its step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import (
    func_graphs,
    keras_layers,
    keras_optimizers,
    keras_variables,
    tf_functions,
    versions,
)

if TYPE_CHECKING:
    import keras

_KNOWN = "_ooo_trainable"
Flags = list[tuple[Any, str, bool]]


def as_first_traced(model: keras.Model, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step`` with the weights that stock training trains.

    Keras keeps its traced train function until the model is compiled again: a layer that is frozen, or
    thawed, after the first step trains on as before.  Each of our traces of the step does as that one.
    """

    @functools.wraps(train_step)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _set(_flags_of(model)):
            return train_step(*args, **kwargs)

    return called


def trained_variables(model: keras.Model) -> list[Any]:
    """The variables that are trainable in each trace of the step."""
    with _set(_flags_of(model)):
        return list(model.trainable_variables)


def _flags_of(model: keras.Model) -> Flags:
    """What is trainable since the model was compiled and its step first traced."""
    stock = _stock_function(model)
    known, flags = vars(model).get(_KNOWN, (None, []))
    if known is None or known is not stock:
        flags = _now(model)
        traced = None if stock is None or versions.is_of_keras_2(model) else tf_functions.step_of_fit(stock)
        if traced is not None:
            flags = _as_traced(model, flags, func_graphs.written_by(traced.graph))
        object.__setattr__(model, _KNOWN, (stock, flags))
    return list(flags)


def _stock_function(model: keras.Model) -> Any:
    """Keras' own train function, also while another stands in its place; None where there is none yet."""
    installed = getattr(vars(model).get("make_train_function"), "ooo", None)
    return model.train_function if installed is None else installed[1]


def _now(model: keras.Model) -> Flags:
    layers = keras_layers.parts_of(model)
    flags = [(layer, "_trainable", bool(layer._trainable)) for layer in layers]
    if versions.is_of_keras_2(model):
        return flags
    return flags + [(variable, "trainable", bool(variable.trainable)) for variable in model.weights]


def _as_traced(model: keras.Model, flags: Flags, written: set[int]) -> Flags:
    """The flags of weights that a traced step writes to, by the ``id`` of their handles, and of their layers.

    A weight that its layer assigns by itself is not trained by that: the optimizer does not know it.
    """
    optimizer = getattr(model, "optimizer", None)
    built = None
    own_step = type(model).train_step is not versions.keras_of(model).Model.train_step
    if not own_step and keras_optimizers.is_optimizer(optimizer):
        optimizers = [optimizer, *keras_optimizers.inner_optimizers(optimizer)]
        built = {id(v) for each in optimizers for v in keras_optimizers.variables_to_apply(each, None)}
    changed = [v for v in model.weights if id(keras_variables.handle_of(v)) in written]
    trained = {id(v) for v in changed if built is None or id(v) in built}
    may_train = {
        id(v) for layer in keras_layers.parts_of(model) for v in keras_variables.made_trainable(layer)
    }
    return [
        (owner, name, _was_trainable(owner, name, value, may_train, trained, set(map(id, changed))))
        for owner, name, value in flags
    ]


def _was_trainable(
    owner: Any, name: str, value: bool, may_train: set[int], trained: set[int], changed: set[int]
) -> bool:
    if name == "trainable":
        return id(owner) in trained if id(owner) in may_train else value
    own = [variable for variable in owner.weights if id(variable) in may_train]
    if own:
        return any(id(variable) in trained for variable in own)
    # BatchNormalization(center=False, scale=False): its averages move while it is trainable.
    return any(id(variable) in changed for variable in owner.weights) if owner.weights else value


@contextlib.contextmanager
def _set(flags: Flags) -> Iterator[None]:
    """Inside the block layers and variables have these flags."""
    before = [(owner, name, getattr(owner, name)) for owner, name, value in flags]
    changed = [old for old, new in zip(before, flags, strict=True) if old[2] != new[2]]
    if not changed:
        yield
        return
    try:
        _put(flags)
        yield
    finally:
        _put(before)


def _put(flags: Flags) -> None:
    for owner, name, value in flags:
        if name == "_trainable":
            object.__setattr__(owner, name, value)
        else:
            owner.trainable = value
