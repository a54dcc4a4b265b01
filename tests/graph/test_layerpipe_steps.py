"""``mode="layerpipe"``: steps and batches of many kinds, against training by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph import layerpipe_models as models
from tests.graph.layerpipe_by_hand import BATCHES, by_hand, data, distance, perceptron
from tests.graph.layerpipe_fit import OWN_CORES, batches_of, costs_of, over_four, perceptron_batches
from tests.graph.layerpipe_spread import fit_spread
from tests.zoo import keras
from tf_ooo.costs.table import CostTable

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(30)]


# -- steps with conditions -------------------------------------------------------------------------


def warm_up():
    return keras.optimizers.schedules.CosineDecay(0.05, BATCHES, warmup_target=0.3, warmup_steps=4)


def restarts():
    return keras.optimizers.schedules.CosineDecayRestarts(0.3, 4, t_mul=1.5)


@pytest.mark.parametrize("schedule", [warm_up, restarts])
def test_conditions_on_the_count_of_steps(schedule):
    """Learning rates of schedules that branch on the count of steps, against training by hand."""
    rates = [float(schedule()(n)) for n in range(BATCHES)]
    model = perceptron(schedule())
    fit_spread(model, over_four(), perceptron_batches())
    expected, _ = by_hand([6, 4, 2, 0], "stash", rate=lambda n: rates[n])
    constant, _ = by_hand([6, 4, 2, 0], "stash")
    assert distance(model.get_weights(), expected) < 1e-6
    assert distance(expected, constant) > 0.01


def test_conditions_on_the_count_of_steps_in_a_step_without_costs():
    callback = over_four(costs=None, profile_steps=0)
    fit_spread(perceptron(warm_up()), callback, perceptron_batches().take(2))
    assert callback.report.planned is not None


def plain_hinge(y, outputs):
    return tf.reduce_mean(tf.maximum(1.0 - (2.0 * y - 1.0) * outputs, 0.0), -1)


def test_conditions_on_labels():
    """Hinge, whose labels are converted on a condition."""
    x, y = data()
    labels = [(part > 0).astype(np.float32) for part in y]
    trained = []
    for loss in ("hinge", plain_hinge):
        model = perceptron()
        model.compile(keras.optimizers.SGD(0.3), loss, jit_compile=False)
        fit_spread(model, over_four(), batches_of(x, labels))
        trained.append(model.get_weights())
    assert distance(*trained) < 1e-6
    assert distance(trained[0], perceptron().get_weights()) > 0.05


# -- shapes, and what can be divided ---------------------------------------------------------------


class ByRows(keras.Sequential):
    """A train_step that needs the number of rows, as a number or as a tensor."""

    known = True

    def train_step(self, data):
        x, y = data
        count = float(int(x.shape[0])) if self.known else tf.cast(tf.shape(x)[0], tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x, training=True) - y)) / (4.0 * count)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def of_known_rows(known):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="tanh") for width in (17, 12, 9, 4)]
    model = ByRows([keras.Input((20,)), *layers])
    model.compile(keras.optimizers.SGD(0.3), jit_compile=False)
    model.known = known
    return model


def test_batches_of_one_size():
    """drop_remainder=True: rows are known when the step is traced, also where a dO is divided."""
    x, y = (np.concatenate(parts) for parts in data())
    parts = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)
    costs = CostTable([tf_ooo.LayerCosts(1.0, back, 1.0) for back in (1.0, 6.0, 1.0, 1.0)], OWN_CORES)
    trained = []
    for known in (True, False):
        model, callback = of_known_rows(known), models.layerpipe(2, costs=costs)
        start = model.get_weights()
        fit_spread(model, callback, parts)
        assert sorted(callback.report.layerpipe["divided"]) == ["1"]
        assert distance(start, model.get_weights()) > 0.05
        trained.append(model.get_weights())
    assert distance(*trained) < 1e-6


def divided_as_by_hand(make, seconds):
    """The report of a fit on two devices, whose weights are those of training by hand."""
    given = (models.X, models.Y)
    model = models.compiled(make, given, models.keras_loss())
    layers = [tf_ooo.LayerCosts(1.0, back, 1.0, weight_bytes=8) for back in seconds]
    costs = CostTable(layers, OWN_CORES)
    callback = models.in_small_functions(2, len(seconds), costs=costs)
    models.spread_fit(model, callback, given)
    by_hand = models.ByHand(make, given, models.crossentropy)
    models.assert_late_as_by_hand(model, callback, by_hand, most=2)
    return callback.report


def test_output_gradients_that_can_be_divided():
    report = divided_as_by_hand(models.transposed, (1.0, 8.0, 1.0))
    assert sorted(report.layerpipe["divided"]) == ["1"]
    rows = [row["name"] for row in report.layers if "dO_high_processor" in row]
    assert [name.rpartition("/")[2] for name in rows] == ["second"]


def test_an_output_gradient_that_cannot_be_divided_is_planned_whole():
    report = divided_as_by_hand(models.scaled, (1.0, 8.0, 1.0, 1.0))
    assert report.layerpipe["divided"] == {}
    assert not [row for row in report.layers if "dO_high_processor" in row]
    assert not report.planned.parts
    assert not [note for note in report.notes if "divided" in note]
    # Eight of 19 seconds cannot be divided, and 2 are above them.
    assert report.predicted_step_s == pytest.approx(11, abs=1.01)


# -- optimizers and weights of samples -------------------------------------------------------------


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)


def adamw():
    return keras.optimizers.AdamW(0.02, weight_decay=0.05)


def loss_of_heads(y, outputs):
    return models.crossentropy(y[0], outputs[0]) + 0.5 * tf.reduce_mean(tf.square(y[1] - outputs[1]))


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_optimizers_with_state(optimizer):
    """Momentum, Adam and weight decay on late gradients are what the optimizer makes of them by hand."""
    sizes = np.linspace(-1, 1, len(models.X)).astype("float32")[:, None]
    given = (models.WORDS, (models.Y, sizes))
    losses = [models.keras_loss(), "mse"]
    model = models.compiled(
        models.two_heads, given, losses, optimizer(), loss_weights=[1.0, 0.5], metrics=None
    )
    callback = models.in_small_functions(3, 5, schedule="pipedream")
    models.spread_fit(model, callback, given)
    by_hand = models.ByHand(models.two_heads, given, loss_of_heads, optimizer)
    models.assert_late_as_by_hand(model, callback, by_hand, most=4, limit=2e-5)


def test_weights_of_samples():
    """Rows with a weight of their own, against training by hand."""
    weights = np.linspace(0.1, 3.0, len(models.X)).astype("float32")

    def weighted(y, weight, outputs):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=outputs)
        return tf.reduce_mean(each * weight)

    given = (models.X, models.Y, weights)
    model = models.compiled(models.mlp, given, models.keras_loss())
    callback = models.in_small_functions(3, 4, schedule="pipedream")
    models.spread_fit(model, callback, given)
    by_hand = models.ByHand(models.mlp, given, weighted)
    models.assert_late_as_by_hand(model, callback, by_hand, most=4)


def test_sparse_batches():
    """Rows in a sparse tensor, whose shape has two numbers."""
    rng = np.random.default_rng(0)
    dense = (rng.normal(size=(40, 9)) * (rng.random((40, 9)) < 0.4)).astype("float32")
    y = rng.normal(size=(40, 2)).astype("float32")
    trained = []
    for sparse in (True, False):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((9,), sparse=sparse)
        hidden = keras.layers.Dense(7, activation="tanh")(inputs)
        hidden = keras.layers.Dense(4, activation="tanh")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        start = model.get_weights()
        x = tf.sparse.from_dense(dense) if sparse else dense
        parts = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        fit_spread(model, models.layerpipe(2, costs=costs_of(3), schedule="pipedream"), parts)
        assert distance(start, model.get_weights()) > 0.01
        trained.append(model.get_weights())
    assert distance(*trained) < 1e-6
