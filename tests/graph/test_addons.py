"""The same bits with tensorflow-addons' layers, losses, optimizers and callbacks: stock against rewritten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow_addons", reason="needs TensorFlow 2.15: make .venv-2.15/.installed")

import tensorflow_addons as tfa

import tf_ooo
from tests import addons, forked
from tests.same_bits import assert_ordered
from tests.zoo import keras
from tf_ooo.compat import keras_compiled

EPOCHS, BATCH_SIZE = 4, 3  # two steps an epoch


def compiled(build, optimizer="adam", loss=None):
    keras.utils.set_random_seed(7)
    model, x, y = build()
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(addons.OPTIMIZERS[optimizer]() if optimizer in addons.OPTIMIZERS else optimizer, loss)
    return model, x, y


def trained(schedule, build, optimizer="adam", loss=None, callbacks=()):
    """The model, its history, and the report of the callback; ``schedule`` None: without it."""
    model, x, y = compiled(build, optimizer, loss)
    ours = [] if schedule is None else [tf_ooo.OOOBackprop(schedule=schedule, profile_steps=1, strict=True)]
    made = [make() for make in callbacks]
    history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0, callbacks=[*ours, *made])
    return model, history, ours[0].report if ours else None


def state_of(model):
    """Weights and every slot that the optimizer keeps."""
    return [*model.get_weights(), *(v.numpy() for v in keras_compiled.state_of(model.optimizer))]


def assert_same_bits(build, optimizer="adam", loss=None, schedule="fast_forward"):
    stock, stock_history, _ = trained(None, build, optimizer, loss)
    ours, history, report = trained(schedule, build, optimizer, loss)
    assert_ordered(report)
    assert report.ops["dW"] > 0
    assert history.history["loss"] == stock_history.history["loss"]
    for a, b in zip(state_of(ours), state_of(stock), strict=True):
        np.testing.assert_array_equal(a, b)
    return stock, ours, report


def test_weight_normalization_in_order():
    assert_same_bits(addons.weight_normalization_by_data, schedule="in_order")


@pytest.mark.parametrize("name", addons.MODELS)
def test_layers(name):
    assert_same_bits(addons.MODELS[name])


@pytest.mark.parametrize("name", addons.OPTIMIZERS)
def test_optimizers(name):
    assert_same_bits(addons.embedded if name == "lazy_adam" else addons.mlp, name)


@pytest.mark.parametrize("name", ["moving_average", "swa"])
def test_averages_of_weights(name):
    """Both models get what ``assign_average_vars`` puts into them, as AverageModelCheckpoint does."""
    stock, ours, _ = assert_same_bits(addons.mlp, name)
    before = stock.get_weights()
    for model in (stock, ours):
        model.optimizer.assign_average_vars(model.trainable_variables)
    for a, b in zip(ours.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(before, stock.get_weights(), strict=True))


def test_focal_loss():
    assert_same_bits(addons.one_hot_mlp, loss=tfa.losses.SigmoidFocalCrossEntropy(from_logits=True))


def test_progress_bar(capfd):
    pytest.importorskip("tqdm")
    bars = [lambda: tfa.callbacks.TQDMProgressBar(show_epoch_progress=False)]
    stock, _, _ = trained(None, addons.mlp)
    ours, _, report = trained("fast_forward", addons.mlp, callbacks=bars)
    assert_ordered(report)
    for a, b in zip(state_of(ours), state_of(stock), strict=True):
        np.testing.assert_array_equal(a, b)
    assert f"{EPOCHS}/{EPOCHS}" in "".join(capfd.readouterr())


def test_time_stopping():
    """Stops after the first epoch; the model has its own train function back."""
    stop = [lambda: tfa.callbacks.TimeStopping(seconds=0)]
    stock, _, _ = trained(None, addons.mlp, callbacks=stop)
    ours, history, report = trained("fast_forward", addons.mlp, callbacks=stop)
    assert len(history.history["loss"]) == 1
    assert_ordered(report)
    assert "make_train_function" not in vars(ours)
    for a, b in zip(state_of(ours), state_of(stock), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.alone
def test_example(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "07_tensorflow_addons.py"
    example = forked.start(forked.run_script, script, tmp_path)
    said, _ = example.communicate(timeout=800)
    assert example.returncode == 0, said
    assert "moved ops" in said
    assert "nothing has been rewritten" not in said
