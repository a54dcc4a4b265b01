"""Fits of pipelines beside stock fits of the same model, which is built once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_graphs import assert_in_order
from tests.zoo import keras
from tf_ooo.compat import keras_compiled, keras_variables


@dataclass(frozen=True)
class Fitted:
    """Holds what a fit left.

    Attributes:
        weights, state: of the model and of its optimizer.
        history: logs of each epoch.
        report: of the callback; None: a stock fit.
        places: devices of the model's variables, afterwards.
    """

    weights: list[np.ndarray]
    state: list[np.ndarray]
    history: dict[str, list[float]]
    report: Any
    places: list[str]


class Training:
    """A model that is trained several times, from the same beginning.

    Args:
        make: the model.
        optimizer: makes it.
        data: x, y and sample weights.
        epochs, batch_size: of a fit.
        compiled: more arguments of compile.
    """

    def __init__(self, make, optimizer, data, epochs=7, batch_size=16, **compiled):
        self.make, self.optimizer, self.data = make, optimizer, data
        self.epochs, self.batch_size, self.compiled = epochs, batch_size, compiled
        self._measured = None
        self._looked_at = None  # how its loss follows from micro-batches, and for which batches

    @cached_property
    def model(self):
        model = compiled_model(self.make, self.optimizer, **self.compiled)
        if not model.built or not model.trainable_weights:
            model(tf.nest.map_structure(lambda rows: rows[:2], self.data[0]))
        keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
        self.untrained = model.get_weights()
        return model

    @cached_property
    def _beginning(self):
        return [(variable, variable.numpy()) for variable in self._variables()]

    def _variables(self):
        return [*self.model.variables, *keras_compiled.state_of(self.model.optimizer)]

    def fit(self, *callbacks, **settings):
        """From the beginning; returns the history."""
        self.restore()
        named = dict(zip(("x", "y", "sample_weight"), self.data, strict=False))
        settings = {"batch_size": self.batch_size, "epochs": self.epochs, **settings}
        return self.model.fit(
            **named, verbose=0, shuffle=False, callbacks=list(callbacks), **settings
        ).history

    def restore(self):
        """Has the model begin again."""
        for variable, value in self._beginning:
            variable.assign(value)
        keras.utils.set_random_seed(3)

    @cached_property
    def stock(self) -> Fitted:
        return self.stock_with()

    def stock_with(self, *callbacks) -> Fitted:
        """A stock fit, also with others' callbacks."""
        return self.left(self.fit(*callbacks))

    def piped(self, callback, *callbacks, measured_before=True, **settings) -> Fitted:
        """A fit with a callback.

        With ``measured_before`` what an earlier fit found out is taken: the step that it took apart, so that
        the first step is in the pipeline already, and that its loss is one of micro-batches.
        """
        callback = self.prepared(callback) if measured_before else callback
        history = self.fit(callback, *callbacks, **settings)
        plans, first = callback._life.mode.plans, callback._life.mode.first_batch
        self._measured, self._looked_at = plans.planned_from, (first.states, first._later, first._checked)
        return self.left(history, callback.report)

    def prepared(self, callback):
        """A callback whose first step is in the pipeline, where the model was taken apart before."""
        if self._measured is not None:
            mode, (step, costs) = callback._life.mode, self._measured
            mode.plans.planned_from, first = (step, mode.options.costs or costs), mode.first_batch
            first.states, first._later, first._checked = self._looked_at
        return callback

    def on(self, data) -> Training:
        """The same model, for other data."""
        self.model, self._beginning  # noqa: B018 - made here, for both
        other = copy.copy(self)
        other.data = data
        vars(other).pop("stock", None)
        return other

    def left(self, history=None, report=None) -> Fitted:
        """Return what training has left."""
        model = self.model
        state = [np.asarray(variable) for variable in keras_compiled.state_of(model.optimizer)]
        return Fitted(model.get_weights(), state, history or {}, report, places(model, []))


def compiled_model(make, optimizer, **compiled):
    """With the seed, the loss and the metrics that all of these tests take unless told otherwise."""
    keras.utils.set_random_seed(3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"loss": loss, "metrics": ["accuracy"], "jit_compile": False, **compiled}
    model = make()
    model.compile(optimizer(), **compiled)
    return model


def devices_here() -> int:
    """The logical devices of this process."""
    return len(tf.config.list_logical_devices("CPU"))


def pipelined(schedule, **options):
    """The callback: all devices, four micro-batches, costs calculated from shapes."""
    defaults = {"devices": devices_here(), "microbatches": 4, "profile_steps": 0}
    return tf_ooo.OOOBackprop(mode="pipeline", schedule=schedule, **(defaults | options))


def fits_of(training, *schedules, measured_before=True, **options) -> dict[str, Fitted]:
    """A fit for each schedule."""
    return {
        name: training.piped(pipelined(name, **options), measured_before=measured_before)
        for name in schedules
    }


def assert_same_bits(training: Training, fits: Mapping[str, Fitted], far=1e-5, weights_everywhere=True):
    """All schedules have the first one's bits, near those of the unsplit batch; ops are on all devices.

    ``far`` None: the batch in one is no measure.
    """
    assert len(fits) > 1
    for before, after in itertools.pairwise(fits.values()):
        assert_equal_bits(before.weights, after.weights)
        assert_equal_bits(before.state, after.state)
        assert before.history == after.history
    for fitted in fits.values():
        assert distance(training.untrained, fitted.weights) > 1e-3
        if far is not None:
            assert_near(training.stock, fitted, far)
        assert fitted.places == ["CPU:0"]
        assert_in_order(fitted.report, devices_here(), weights_everywhere)


def assert_near(stock, fitted, far):
    """Weights, and the loss of each epoch."""
    assert distance(stock.weights, fitted.weights) < far
    assert np.abs(np.subtract(stock.history["loss"], fitted.history["loss"])).max() < far


def distance(arrays, others) -> float:
    """The largest difference."""
    pairs = zip(arrays, others, strict=True)
    return max(float(np.abs(np.subtract(a, b, dtype="float64")).max()) for a, b in pairs if a.size)


def assert_equal_bits(arrays, others):
    assert len(arrays) > 0
    for a, b in zip(arrays, others, strict=True):
        assert a.tobytes() == b.tobytes()


def places(model, more=None):
    """Devices of a model's variables, and of its optimizer's or of ``more``."""
    variables = [*model.variables, *(model.optimizer.variables if more is None else more)]
    return sorted({keras_variables.value_of(variable).device[-5:] for variable in variables})
