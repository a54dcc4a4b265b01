"""A base for callbacks that every Keras accepts."""

from __future__ import annotations

from typing import Any

import keras

_HOOKS = ("on_{}_batch_begin", "on_{}_batch_end")


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """``keras.callbacks.Callback`` that ``tf_keras`` may be given, too: Keras 2 asks for its hooks."""

    def _implements_train_batch_hooks(self) -> bool:
        return self._overrides("train") or self._overrides("", "on_batch_begin", "on_batch_end")

    def _implements_test_batch_hooks(self) -> bool:
        return self._overrides("test")

    def _implements_predict_batch_hooks(self) -> bool:
        return self._overrides("predict")

    def _overrides(self, mode: str, *names: str) -> bool:
        wanted = names or [name.format(mode) for name in _HOOKS]
        own: Any = type(self)
        return any(getattr(own, name) is not getattr(keras.callbacks.Callback, name) for name in wanted)
