"""The seconds of a step's ops, measured on one step of a real fit, in the report."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tf_ooo
from tests import zoo
from tf_ooo.costs.table import CostTable


def _fit(name="convolutions", steps=10, **options):
    model, x, y = zoo.SMALL[name]()
    model.compile("adam", zoo.keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    if zoo.KERAS_3:
        zoo.make_variables(model, x, y)
    x, y = (tf.nest.map_structure(lambda a: tf.concat([a] * steps, 0), data) for data in (x, y))
    # Ten steps of an order that is applied as asked: timed, and then profiled.
    callback = tf_ooo.OOOBackprop(**{"schedule": "fast_forward", **options})
    batch = tf.nest.flatten(x)[0].shape[0] // steps
    model.fit(x, y, batch_size=batch, epochs=1, verbose=0, callbacks=[callback])
    return callback.report


# Keras 2's LSTM and Dropout draw random numbers from a state of their own: the stock step is kept there.
@pytest.mark.parametrize("name", ["convolutions", pytest.param("lstm_gru", marks=zoo.needs_keras_3)])
def test_fit_measures_its_ops(name, tmp_path):
    report = _fit(name)
    assert report.measured_step_s is not None
    assert report.predicted_step_s > 0
    assert report.costs.source in ("measured", "mixed")
    # Keras 2 calls one kernel for both gradients of a batch normalization; it counts as dO.
    fused = not zoo.KERAS_3
    alone = [row for row in report.costs.layers if not (fused and "batch_normalization" in row.name)]
    assert all(layer.weight_grad_s > 0 for layer in alone)
    report.costs.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == report.costs
    assert "one by one" in report.summary()
    report.to_dict()


def test_another_profiler_is_no_problem(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        report = _fit()
    finally:
        tf.profiler.experimental.stop()
    assert report.predicted_step_s is None
    assert any("not predicted" in note for note in report.notes)


@zoo.needs_keras_3
def test_no_step_runs_twice(monkeypatch):
    """Neither where the profile cannot be read."""

    def broken(_):
        raise tf_ooo.CostError("no op")

    monkeypatch.setattr("tf_ooo.costs.profile.read_profile", broken)
    model, x, y = zoo.SMALL["mlp"]()
    model.compile(
        "sgd", "mse" if y.ndim > 1 else zoo.keras.losses.SparseCategoricalCrossentropy(), jit_compile=False
    )
    callback = tf_ooo.OOOBackprop(compare=True)
    model.fit(x, y, batch_size=len(x), epochs=42, verbose=0, callbacks=[callback])
    assert callback.report.measured_step_s is not None
    assert any("no op" in note for note in callback.report.notes)
    assert int(model.optimizer.iterations.numpy()) == 42
