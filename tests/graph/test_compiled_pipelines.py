"""Fits of pipelines whose tasks XLA compiles: the numbers of the same pipeline op by op, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.fuzz.compared import beyond_rounding
from tests.graph.pipeline_models import UNEVEN, momentum
from tests.zoo import keras, needs_keras_3, needs_xla_streams
from tf_ooo.rewriting import staged

pytestmark = [pytest.mark.devices(2), needs_keras_3, needs_xla_streams, pytest.mark.takes(40)]
layers = keras.layers


def model_of(*hidden, optimizer=momentum, **compiled):
    """``hidden`` make layers."""
    keras.backend.clear_session()
    keras.backend.clear_session()  # names of variables are compared
    keras.utils.set_random_seed(3)
    parts = [layers.Dense(9, "tanh"), *(make() for make in hidden), layers.Dense(8, "tanh"), layers.Dense(3)]
    model = keras.Sequential([keras.Input((7,)), *parts])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], jit_compile=False, **compiled)
    return model


def callback(compile_tasks, **options):
    given = {"devices": 2, "microbatches": 2, "schedule": "zb_h1", "profile_steps": 0, **options}
    return tf_ooo.OOOBackprop(tf_ooo.Pipeline(compile_tasks=compile_tasks, strict=True, **given))


def fit(model, callback, rows=48, **given):
    """Two epochs of batches of 16 rows."""
    x, y = (of[:rows] for of in UNEVEN)
    given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **given}
    return model.fit(x, y, callbacks=[callback], **given).history


def left(model, history):
    variables = (*model.variables, *model.optimizer.variables)
    return [*history.items(), *((variable.path, np.array(variable)) for variable in variables)]


@pytest.fixture
def compiled(monkeypatch):
    """The graphs whose calls were compiled."""
    graphs, as_compiled = [], staged.as_compiled

    def compiling(make):
        graphs.append(as_compiled(make))
        return graphs[-1]

    monkeypatch.setattr(staged, "as_compiled", compiling)
    return graphs


def test_a_second_fit_runs_what_the_first_has_compiled(compiled):
    trained = []
    for compile_tasks in (False, True):
        model, ours = model_of(), callback(compile_tasks)
        histories = [fit(model, ours), fit(model, ours)]
        trained.append([left(model, history) for history in histories])
        if compile_tasks:
            assert ours.report.compiled_tasks.startswith(("1", "2"))
    assert len(compiled) == 1
    for op_by_op, by_xla in zip(*trained, strict=True):
        assert not beyond_rounding(op_by_op, by_xla, "float32")


def test_masks_of_dropout_are_the_same():
    trained = []
    for compile_tasks in (False, True):
        model = model_of(lambda: layers.Dropout(0.4, seed=5), lambda: layers.GaussianNoise(0.3, seed=6))
        trained.append(left(model, fit(model, callback(compile_tasks), rows=52)))
    assert not beyond_rounding(*trained, "float32")


def test_a_layer_that_xla_compiles_by_itself_stays_a_call(compiled):
    def doubled():
        function = tf.function(lambda x: 2.0 * tf.tanh(x), jit_compile=True)
        return layers.Lambda(function, output_shape=(9,))

    trained = []
    for compile_tasks in (False, True):
        model, ours = model_of(doubled), callback(compile_tasks)
        trained.append(left(model, fit(model, ours)))
    assert len(compiled) == 1
    assert ours.report.compiled_tasks
    assert not any("XLA does not compile" in note for note in ours.report.notes)
    assert not beyond_rounding(*trained, "float32")


def test_a_short_fit_says_that_it_was_too_short(compiled):
    ours = callback(True, first_steps="cut")
    fit(model_of(), ours, rows=16, epochs=1)
    assert not compiled
    assert ours.report.compiled_tasks == ""
    assert "XLA does not compile the tasks: the fit had too few steps" in ours.report.notes


def test_weights_are_saved_and_evaluated_after_it(tmp_path):
    results = []
    for compile_tasks in (False, True):
        model = model_of()
        fit(model, callback(compile_tasks), rows=52)
        model.save_weights(tmp_path / "x.weights.h5")
        x, y = UNEVEN
        values = [*model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)]
        again = model_of()
        again.load_weights(tmp_path / "x.weights.h5")
        assert np.array_equal(again.predict(x, verbose=0), values[-1])
        results.append([(str(place), np.asarray(value)) for place, value in enumerate(values)])
    assert not beyond_rounding(*results, "float32")
