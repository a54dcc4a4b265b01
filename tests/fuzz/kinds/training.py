"""Trains the model of a set-up: what is left of it, what was said, and when."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from tests.fuzz.compared import average_by_horovod, of_all_ranks
from tests.fuzz.kinds.drawing import BATCH_SIZE, OwnSetup
from tests.fuzz.kinds.models import OUTPUTS, compiled, data_of, model_of


@dataclass
class Trained:
    """Holds what one ``fit`` left: ``values`` of weights, slots and logs by name.

    ``early`` is what was said before the first step had ended, ``said`` is all, with the report's notes.
    """

    values: list[tuple[str, np.ndarray]] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    report: Any = None
    refused: str = ""
    changed: list[str] = field(default_factory=list)
    logs: tuple[str, ...] = ()


class _Ends(keras.callbacks.Callback):
    """Counts batches, beside what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


class _Heard(logging.Handler):
    def __init__(self, trained: Trained, ends: _Ends) -> None:
        super().__init__()
        self.trained, self.ends = trained, ends

    def emit(self, record: logging.LogRecord) -> None:
        self.hear(record.getMessage())

    def hear(self, text: str) -> None:
        self.trained.said.append(text)
        if not self.ends.count:
            self.trained.early.append(text)


@contextlib.contextmanager
def _hearing(trained: Trained, ends: _Ends) -> Iterator[None]:
    log, handler = logging.getLogger("tf_ooo"), _Heard(trained, ends)
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: handler.hear(str(message))
            warnings.simplefilter("always")
            yield
    finally:
        log.removeHandler(handler)


def train(setup: OwnSetup, ours: bool, ranks: Any = None) -> Trained:
    """Stock, or with our callback; the same weights and data each time."""
    try:
        keras.config.set_floatx(setup.dtype)
        return _train(setup, ours, ranks)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def _train(setup: OwnSetup, ours: bool, ranks: Any) -> Trained:
    model, trained, ends = model_of(setup), Trained(), _Ends()
    fitting = Fitting(setup, ours, ranks)
    fitting.before(model)
    callback = fitting.callback() if ours else None
    before = {v.path: np.array(v) for v in model.variables}
    with _hearing(trained, ends):
        try:
            history = fitting.fit(model, setup.epochs, [callback, ends] if callback else [ends]).history
        except tf_ooo.OOOError as error:
            trained.refused = f"{type(error).__name__}: {error}"
            trained.changed = [
                v.path for v in model.variables if not np.array_equal(before.get(v.path, v), v)
            ]
            history = {}
    if callback:
        trained.report = callback.report
        trained.said += callback.report.notes if callback.report else []
    if ranks and not ours:
        history = of_all_ranks(history, setup.rows, ranks)
    trained.logs = tuple(history)
    trained.values = [*((name, np.array(of)) for name, of in sorted(history.items())), *_values(model)]
    return trained


class Fitting:
    """Fits of one process: its data, stock or ours, alone or with other ranks."""

    def __init__(self, setup: OwnSetup, ours: bool, ranks: Any) -> None:
        self.setup, self.ours, self.ranks = setup, ours, ranks
        self.data = data_of(setup, ranks.rank if ranks else 0)

    def callback(self) -> Any:
        return tf_ooo.OOOBackprop(**self.setup.options)

    def fit(self, model: Any, epochs: int, callbacks: Any = ()) -> Any:
        if self.ranks and not self.ours:
            self._average_by_horovod(model)
        options = {"epochs": epochs, "verbose": 0, "callbacks": list(callbacks)}
        if self.setup.as_dataset:
            return model.fit(tf.data.Dataset.from_tensor_slices(self.data).batch(BATCH_SIZE), **options)
        return model.fit(*self.data, batch_size=BATCH_SIZE, shuffle=False, **options)

    def _average_by_horovod(self, model: Any) -> None:
        import horovod.tensorflow as hvd

        for optimizer in optimizers_of(model):
            if "apply" not in vars(optimizer):
                average_by_horovod(optimizer, op=hvd.Average)

    def before(self, model: Any) -> None:
        """Do what the process does before the ``fit`` that is compared."""
        kind, variant = self.setup.kind, self.setup.variant
        if kind == "frozen after compile":
            self._first(model)
            model.layers[1].trainable = variant == "thawed"
            if variant == "compiled again":
                compiled(model, self.setup)
        if variant == "fitted twice":
            self._first(model, rewritten=True)
        elif kind == "several models":
            self._first(self._other(model), rewritten=variant == "rewritten before")
        if variant == "compiled twice":
            self._first(model)
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", jit_compile=False)

    def _first(self, model: Any, rewritten: bool = False) -> None:
        """Ranks train together each time."""
        self.fit(model, 1, [self.callback()] if self.ours and (rewritten or self.ranks) else [])

    def _other(self, model: Any) -> Any:
        """A small model of the same input; it may have the first layer of this one."""
        i = keras.Input(model.input_shape[1:], dtype=model.input.dtype)
        first = next(layer for layer in model.layers if layer.weights)
        shares = self.setup.variant == "shares a layer"
        h = (first if shares else type(first).from_config(first.get_config()))(i)
        h = keras.layers.Flatten()(h) if len(h.shape) > 2 else h
        other = keras.Model(i, keras.layers.Dense(OUTPUTS)(h))
        other.compile("adam", "mse", jit_compile=False)
        return other


def optimizers_of(model: Any) -> list[Any]:
    names = ("optimizer", "second", "of_critic", "of_generator")
    return [optimizer for name in names if (optimizer := getattr(model, name, None)) is not None]


def _values(model: Any) -> list[tuple[str, np.ndarray]]:
    variables = [*model.variables]
    for optimizer in optimizers_of(model):
        variables += optimizer.variables
    # Slots of the optimizer in a loss-scaling one, whichever of both has made them.
    return [(v.path.removeprefix("loss_scale_optimizer/"), np.array(v)) for v in variables]
