"""Steps of ``model.fit`` as users call it, without and with ``OOOBackprop()``: ``tf-ooo bench single``."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

import tf_ooo
from tf_ooo.bench.single.cases import Case
from tf_ooo.bench.single.inputs import dataset
from tf_ooo.bench.single.networks import CLASSES, build
from tf_ooo.compat.callbacks import Callback

_STEPS_UNTIL_DECIDED, _MOST_FITS = 10, 20


class _Clock(Callback):
    """Seconds of a fit from the end of its first step."""

    started = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """The first step is over when its weights are there."""
        if batch == 0:
            self.model.optimizer.iterations.numpy()
            self.started = time.perf_counter()


class TimedFit:
    """A model that is trained a few steps at a time; its epochs end when all steps have.

    Args:
        case: the network, its batch and its data.
        ours: our callback is there.
        end_s: of ``time.monotonic``; no more steps then, decided or not.
    """

    def __init__(self, case: Case, ours: bool, end_s: float) -> None:
        keras.utils.set_random_seed(0)
        self._model = build(case.network, case.size)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=True)
        self._data = dataset(self._model.input_shape[1:], case.batch, CLASSES, case.data)
        self._clock = _Clock()
        self._ours = None
        if ours:
            self._ours = tf_ooo.OOOBackprop(any_platform=not tf.config.list_physical_devices("GPU"))
        self.step_s(1)
        for _ in range(_MOST_FITS):
            if self._ours is None or not self._ours.report.undecided or time.monotonic() > end_s:
                break
            self.step_s(_STEPS_UNTIL_DECIDED)

    def step_s(self, count: int) -> float:
        """Seconds of a step, on average over ``count`` after one that is not timed."""
        callbacks = [self._clock] if self._ours is None else [self._ours, self._clock]
        self._model.fit(self._data, steps_per_epoch=count + 1, shuffle=False, verbose=0, callbacks=callbacks)
        return (time.perf_counter() - self._clock.started) / count

    @property
    def note(self) -> str:
        """What our callback has decided."""
        report = None if self._ours is None else self._ours.report
        return "" if report is None else "; ".join(filter(None, (report.state, report.way, report.compared)))
