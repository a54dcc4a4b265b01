"""Tells about the running ``fit``: callbacks, batches, where it begins, what it saw, what it trains."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from tf_ooo.compat import func_graphs, keras_compiled, keras_layers, keras_variables, tf_functions, versions

_KNOWN = "_ooo_trainable"
Flags = list[tuple[Any, str, bool]]


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """Serves as ``keras.callbacks.Callback``, also for ``tf_keras``: Keras 2 asks for its hooks."""

    def _implements_train_batch_hooks(self) -> bool:
        return _overrides(self, keras.callbacks.Callback, "train_batch", "batch")

    def _implements_test_batch_hooks(self) -> bool:
        return _overrides(self, keras.callbacks.Callback, "test_batch")

    def _implements_predict_batch_hooks(self) -> bool:
        return _overrides(self, keras.callbacks.Callback, "predict_batch")


def _overrides(callback: object, base: Any, *whats: str) -> bool:
    own, kind = vars(callback), type(callback)
    hooks = [f"on_{what}_{when}" for what in whats for when in ("begin", "end")]
    return any(name in own or getattr(kind, name, None) is not getattr(base, name, None) for name in hooks)


# The object that gives a ``fit`` its batches enters this context manager around each epoch.
AROUND_BATCHES = "catch_stop_iteration"
_KERAS_2_START = "_maybe_load_initial_counters_from_ckpt"


def running_callback_list() -> Any:
    """Return the ``CallbackList`` that is calling this process' innermost callback; None if none is."""
    for frame in _frames(sys._getframe()):
        caller = frame.f_locals.get("self")
        if caller is not None and isinstance(caller, versions.keras_of(caller).callbacks.CallbackList):
            return caller
    return None


def epochs_of_fit() -> int | None:
    """Return the ``epochs`` of the ``fit`` that is calling a callback; None if unknown."""
    epochs = (getattr(running_callback_list(), "params", None) or {}).get("epochs")
    return None if epochs is None else int(epochs)


def may_stop_within_epochs() -> bool:
    """Return whether a callback of the calling ``fit`` acts on single batches and might end training there.

    In Keras only ``TerminateOnNaN`` does, and ``LambdaCallback``, depending on its functions.
    """
    return any(map(_acts_on_batches, getattr(running_callback_list(), "callbacks", ())))


def _acts_on_batches(callback: object) -> bool:
    kind = type(callback)
    package, stops = kind.__module__.partition(".")[0], kind.__name__ in ("TerminateOnNaN", "LambdaCallback")
    if package == "keras_callbacks" or (package in ("keras", "tf_keras") and not stops):
        return False
    return _overrides(callback, versions.keras_of(callback).callbacks.Callback, "batch", "train_batch")


def argument_of_fit(name: str) -> Any:
    """Return an argument of the innermost running ``fit`` by name; None if it was not given."""
    fits = (frame.f_locals for frame in _frames(sys._getframe()) if frame.f_code.co_name == "fit")
    return next((arguments[name] for arguments in fits if name in arguments), None)


def running_batches() -> Any:
    """Return the object with :data:`AROUND_BATCHES` that gives the innermost ``fit`` its batches, or None."""
    for frame in _frames(sys._getframe()):
        for name in ("epoch_iterator", "data_handler"):  # Keras 3, Keras 2
            if hasattr(batches := frame.f_locals.get(name), AROUND_BATCHES):
                return batches
    return None


def main_thread_trains() -> bool:
    """Return whether the main thread is in an epoch of a ``fit``; other threads may ask."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    return any(f.f_code.co_name == "fit" and "epoch" in f.f_locals for f in _frames(innermost))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those around it: Keras has no other way to their variables."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def ends_training_without_data(model: keras.Model) -> bool:
    """Say whether ``fit`` takes a StopIteration before the last expected step as the end of all training."""
    return versions.is_of_keras_2(model)


def start_epoch_of(model: keras.Model) -> int:
    """Return the epoch that ``BackupAndRestore`` wants ``fit`` to begin with; 0 if none."""
    if versions.is_of_keras_2(model):
        return int(getattr(model, _KERAS_2_START)(None, 0)[0])
    return int(model._initial_epoch or 0)


def set_start_epoch(model: keras.Model, epoch: int) -> None:
    """Set what :func:`start_epoch_of` returns."""
    if not versions.is_of_keras_2(model):
        model._initial_epoch = epoch or None
        return
    own = getattr(model, _KERAS_2_START)
    if own(None, 0)[0] == epoch:
        return

    def once(*_: Any) -> tuple[int, int]:
        keras_layers.unshadow(model, _KERAS_2_START)
        return epoch, 0

    keras_layers.shadow(model, _KERAS_2_START, once)


# Keras 3's BackupAndRestore saves with this method, to these paths, all of them below the first.
BACKUP_SAVE = "_save_model"
_BACKUP_PATHS = (
    *("backup_dir", "_weights_path", "_training_metadata_path"),
    *("_prev_weights_path", "_prev_training_metadata_path"),
)


def backup_save(callback: object) -> Callable[[], None] | None:
    """Return how a ``BackupAndRestore`` saves; None for others and for Keras 2's, which saves whole."""
    known = all(hasattr(callback, name) for name in (BACKUP_SAVE, *_BACKUP_PATHS[:3]))
    return getattr(callback, BACKUP_SAVE) if known else None


@contextlib.contextmanager
def backing_up_into(callback: Any, folder: str) -> Iterator[None]:
    """Make a ``BackupAndRestore`` save to that folder inside the block."""
    paths = {name: getattr(callback, name) for name in _BACKUP_PATHS if hasattr(callback, name)}
    own = str(callback.backup_dir)
    try:
        for name, path in paths.items():
            setattr(callback, name, folder + str(path)[len(own) :])
        yield
    finally:
        for name, path in paths.items():
            setattr(callback, name, path)


def samples_seen(model: keras.Model) -> float:
    """Return how many samples the model's loss is averaged over since the reset; 0 if unknown."""
    tracker = getattr(model, "_loss_tracker", None)
    if versions.is_of_keras_2(model):
        tracker = getattr(getattr(model, "compiled_loss", None), "_total_loss_mean", None)
    return 0.0 if tracker is None else float(tf.convert_to_tensor(tracker.count))


@dataclass(frozen=True)
class _Traced:
    """Keeps the inputs of the first trace; Keras would save and load a tuple's items with the model.

    ``function`` is stock Keras' train function at that time.
    """

    function: Any
    flags: Flags
    optimizer: Any


def as_first_traced(model: keras.Model, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``train_step`` with the weights that stock training trains.

    Keras keeps its traced train function until the model is compiled again: a layer that is frozen or thawed
    after the first step trains on as before.  Each of our traces of the step does the same.
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
    """Return ``first_step``, from :func:`as_first_traced`, with the first trace's optimizer, within ``fit``.

    Elsewhere it is ``own_step``: for ``train_on_batch`` Keras traces the step for its own batches.
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
    """Return the variables that are trainable in the step's traces, or would be if it were traced now."""
    with _set(_flags_of(model)):
        return list(model.trainable_variables)


def _flags_of(model: keras.Model) -> Flags:
    """Return the flags at the step's first trace since the model was compiled; today's if there is none."""
    if (traced := _first_trace_of(model)) is not None:
        return traced.flags
    flags = [(layer, "_trainable", bool(layer._trainable)) for layer in keras_layers.parts_of(model)]
    if not versions.is_of_keras_2(model):
        flags += [(variable, "trainable", bool(variable.trainable)) for variable in model.weights]
    written = _written_by_stock(model)
    return flags if written is None else _as_traced(model, flags, written)


def _first_trace_of(model: keras.Model) -> _Traced | None:
    """Return our notes of the step's first trace; None if there was none since the model was compiled."""
    traced: _Traced | None = vars(model).get(_KNOWN)
    function = None if traced is None else traced.function
    return traced if function is not None and function is _stock_function(model) else None


def _written_by_stock(model: keras.Model) -> set[int] | None:
    """Return the ``id`` of each handle that Keras' own traced step writes to; None if it has no trace."""
    stock = _stock_function(model)
    traced = None if stock is None or versions.is_of_keras_2(model) else tf_functions.step_of_fit(stock)
    return None if traced is None else func_graphs.written_by(traced.graph)


def other_optimizer(model: keras.Model) -> bool:
    """Return whether the model has been given another optimizer since its step was first traced.

    Until the model is compiled again, stock Keras goes on with the first one.
    """
    if (traced := _first_trace_of(model)) is not None:
        return traced.optimizer is not getattr(model, "optimizer", None)
    written = _written_by_stock(model)
    if written is None or _known_to_optimizer(model) is None:  # only Keras 3 tells the latter
        return False
    weights, state = (
        {id(keras_variables.handle_of(v)) for v in variables} & written
        for variables in (model.weights, keras_compiled.state_of(model.optimizer))
    )
    return bool(weights) and not state


def _stock_function(model: keras.Model) -> Any:
    """Return Keras' own train function, even while another replaces it; None if there is none yet."""
    installed = getattr(vars(model).get("make_train_function"), "ooo", None)
    return model.train_function if installed is None else installed[1]


def _as_traced(model: keras.Model, flags: Flags, written: set[int]) -> Flags:
    """Return the flags, True for weights that a traced step writes to (``id`` of handles) and their layers.

    A weight that only its layer assigns does not count as trained: the optimizer does not know it.
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
        # The averages of BatchNormalization(center=False, scale=False) move while it is trainable.
        return bool(weights & changed) if weights else value

    return [(owner, name, was_trainable(owner, name, value)) for owner, name, value in flags]


def _known_to_optimizer(model: keras.Model) -> set[int] | None:
    """Return the ``id`` of each variable that Keras' own step updates; None if the step is not Keras'."""
    optimizer = getattr(model, "optimizer", None)
    own_step = type(model).train_step is not versions.keras_of(model).Model.train_step
    if own_step or not keras_compiled.is_optimizer(optimizer):
        return None
    optimizers = [optimizer, *keras_compiled.inner_optimizers(optimizer)]
    return {id(v) for each in optimizers for v in keras_variables.made_trainable(each)}


@contextlib.contextmanager
def _set(flags: Flags) -> Iterator[None]:
    """Set these flags of layers and variables inside the block."""
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
