"""The ``fit`` that is running: its callbacks and batches, where it begins and what it has seen."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from tf_ooo.compat import keras_layers, versions


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """``keras.callbacks.Callback`` that ``tf_keras`` may be given, too: Keras 2 asks for its hooks."""

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


# The object that gives a ``fit`` its batches has this context manager around each epoch.
AROUND_BATCHES = "catch_stop_iteration"
_KERAS_2_START = "_maybe_load_initial_counters_from_ckpt"


def running_callback_list() -> Any:
    """The ``CallbackList`` that is calling this process' innermost callback; None: nobody calls one."""
    for frame in _frames(sys._getframe()):
        caller = frame.f_locals.get("self")
        if caller is not None and isinstance(caller, versions.keras_of(caller).callbacks.CallbackList):
            return caller
    return None


def epochs_of_fit() -> int | None:
    """The ``epochs`` of the ``fit`` that is calling a callback; None: nobody knows."""
    epochs = (getattr(running_callback_list(), "params", None) or {}).get("epochs")
    return None if epochs is None else int(epochs)


def may_stop_within_epochs() -> bool:
    """Return whether a callback of the calling ``fit`` acts on single batches and might end it there.

    Of Keras' own only ``TerminateOnNaN`` does, and ``LambdaCallback`` whatever it was given.
    """
    return any(map(_acts_on_batches, getattr(running_callback_list(), "callbacks", ())))


def _acts_on_batches(callback: object) -> bool:
    kind = type(callback)
    package, stops = kind.__module__.partition(".")[0], kind.__name__ in ("TerminateOnNaN", "LambdaCallback")
    if package == "keras_callbacks" or (package in ("keras", "tf_keras") and not stops):
        return False
    return _overrides(callback, versions.keras_of(callback).callbacks.Callback, "batch", "train_batch")


def argument_of_fit(name: str) -> Any:
    """Return the argument of that name of the innermost running ``fit``; None: nothing was given."""
    fits = (frame.f_locals for frame in _frames(sys._getframe()) if frame.f_code.co_name == "fit")
    return next((arguments[name] for arguments in fits if name in arguments), None)


def running_batches() -> Any:
    """Return what gives the innermost ``fit`` its batches, by :data:`AROUND_BATCHES`; None: it is unknown."""
    for frame in _frames(sys._getframe()):
        for name in ("epoch_iterator", "data_handler"):  # Keras 3, Keras 2
            if hasattr(batches := frame.f_locals.get(name), AROUND_BATCHES):
                return batches
    return None


def main_thread_trains() -> bool:
    """Return whether this process' main thread is in an epoch of a ``fit``; for another thread to ask."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    return any(f.f_code.co_name == "fit" and "epoch" in f.f_locals for f in _frames(innermost))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those around it: Keras hands what is in them to nobody."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def ends_training_without_data(model: keras.Model) -> bool:
    """Say whether ``fit`` takes a StopIteration before the last expected step for the end of all training."""
    return versions.is_of_keras_2(model)


def start_epoch_of(model: keras.Model) -> int:
    """The epoch that ``BackupAndRestore`` wants ``fit`` to begin with; 0 if none."""
    if versions.is_of_keras_2(model):
        return int(getattr(model, _KERAS_2_START)(None, 0)[0])
    return int(model._initial_epoch or 0)


def set_start_epoch(model: keras.Model, epoch: int) -> None:
    """See :func:`start_epoch_of`."""
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


# Keras 3's BackupAndRestore saves with this method, to these paths, all below the first.
BACKUP_SAVE = "_save_model"
_BACKUP_PATHS = (
    *("backup_dir", "_weights_path", "_training_metadata_path"),
    *("_prev_weights_path", "_prev_training_metadata_path"),
)


def backup_save(callback: object) -> Callable[[], None] | None:
    """Return how a ``BackupAndRestore`` saves; None for other callbacks and Keras 2's, which saves whole."""
    known = all(hasattr(callback, name) for name in (BACKUP_SAVE, *_BACKUP_PATHS[:3]))
    return getattr(callback, BACKUP_SAVE) if known else None


@contextlib.contextmanager
def backing_up_into(callback: Any, folder: str) -> Iterator[None]:
    """Inside the block a ``BackupAndRestore`` saves to that folder."""
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
    """Return over how many samples the model's loss has been averaged since the reset; 0: unknown."""
    tracker = getattr(model, "_loss_tracker", None)
    if versions.is_of_keras_2(model):
        tracker = getattr(getattr(model, "compiled_loss", None), "_total_loss_mean", None)
    return 0.0 if tracker is None else float(tf.convert_to_tensor(tracker.count))
