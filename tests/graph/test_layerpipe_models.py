"""``mode="layerpipe"`` for models of many kinds, against training by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph import layerpipe_models as models
from tests.graph.layerpipe_by_hand import distance
from tests.graph.layerpipe_fit import Saves, places, trained_weights, updates_of
from tests.graph.layerpipe_spread import assert_spread, recorded
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(3), pytest.mark.takes(30)]

IMAGES = (models.X, models.Y)
CASES = {
    "tied": (models.Tied, (models.WORDS, np.roll(models.WORDS, 1, 1))),
    "embedded": (models.embedded, (models.WORDS, models.Y)),
    "two_inputs": (models.two_inputs, ((models.X, (models.WORDS / 29).astype("float32")), models.Y)),
    "custom_train_step": (models.Custom, IMAGES),
    "normalized": (models.normalized, IMAGES),
    "used_twice": (models.used_twice, IMAGES),
}
# A normalization's scale and offset may be layers of their own.
MORE_LAYERS = {"normalized": 1}


def trained(name, make, data):
    """The model, and the callback with its report."""
    loss = None if name == "custom_train_step" else models.keras_loss()
    model = models.compiled(make, data, loss)
    callback = models.in_small_functions(3, models.layers_of(model) + MORE_LAYERS.get(name, 0))
    models.spread_fit(model, callback, data)
    assert updates_of(model) == models.BATCHES
    planned = {row["name"]: row["delay_steps"] for row in callback.report.layers}
    for path, late in callback.report.layerpipe["delay_steps"].items():
        # A layer of one weight has the weight's name.
        assert late == planned.get(path.rpartition("/")[0], planned.get(path)), path
    return model, callback


@pytest.mark.parametrize("name", CASES)
def test_late_gradients_of(name):
    make, data = CASES[name]
    model, callback = trained(name, make, data)
    loss = models.squared if name == "custom_train_step" else models.crossentropy
    models.assert_late_as_by_hand(model, callback, models.ByHand(make, data, loss), most=4)


@pytest.fixture
def in_bfloat16():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.mark.usefixtures("in_bfloat16")
def test_late_gradients_in_bfloat16():
    """Sums of products are rounded to 8 bits, in an order of the kernel's own."""
    model, callback = trained("bfloat16", models.mlp, IMAGES)
    late = models.late_steps(model, callback)
    assert max(late) == 4
    by_hand = models.ByHand(models.mlp, IMAGES, models.crossentropy)
    away = distance(trained_weights(model), by_hand.late(late))
    assert away < 2e-2
    assert distance(trained_weights(model), by_hand.late([0] * len(late))) > 2 * away


@pytest.mark.usefixtures("in_bfloat16")
def test_casts_of_later_weights_are_not_kept():
    """Tensors that forward passes hand on have as many rows as a batch: no kernel does, read or cast."""
    model = models.compiled(models.mlp, IMAGES, models.keras_loss())
    with recorded() as spreads:
        rows = 3 * models.ROWS
        model.fit(
            models.X[:rows], models.Y[:rows], batch_size=models.ROWS, verbose=0,
            callbacks=[models.in_small_functions(2, 4, schedule="pipedream", weights="latest")],
        )  # fmt: skip
    (made,) = spreads
    assert_spread(made, 2)
    assert made.ticks.weights.placeholders
    shapes = {
        r.source: made.traced.outputs[r.source.partition(":")[0]][0].shape for r in made.delays.registers
    }
    forward = {source: shape for source, shape in shapes.items() if not source.startswith("gradient_tape")}
    assert forward
    assert not [source for source, shape in forward.items() if shape and None not in shape]


class Masked(keras.layers.Layer):
    """Dropout from a seed that it shares with others."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def call(self, x):
        return keras.random.dropout(x, 0.5, seed=self.seed)


def with_a_shared_seed():
    seed = keras.random.SeedGenerator(5)
    first, then = (keras.layers.Dense(width, activation="tanh") for width in (9, 8))
    layers = [first, Masked(seed), then, Masked(seed), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((7,)), *layers])


@needs_keras_3
def test_layers_on_two_devices_share_a_seed():
    """One batch is trained as by the stock step, with its masks: no gradient is late."""
    batch = models.X[: models.ROWS], models.Y[: models.ROWS]
    stock, ours = (models.compiled(with_a_shared_seed, IMAGES, models.keras_loss()) for _ in range(2))
    start = ours.get_weights()
    stock.fit(*batch, batch_size=models.ROWS, verbose=0)
    callback = models.in_small_functions(3, 3, schedule="pipedream")
    models.fit_spread(ours, callback, *batch, batch_size=models.ROWS)
    assert [row["delay_steps"] for row in callback.report.layers] == [4, 2, 0]
    assert distance(trained_weights(stock), trained_weights(ours)) < 1e-6
    assert distance(start, ours.get_weights()) > 0.01


# -- training that ends early ----------------------------------------------------------------------


class Ends(Saves):
    """Stops training after some batches, or raises."""

    def __init__(self, count, error=None):
        super().__init__(count)
        self.error = error

    def take(self):
        if self.error is not None:
            raise self.error
        self.model.stop_training = True


def callback_for_mlp():
    """Return a callback with as many rounds in one function as there are by default."""
    return models.layerpipe(3, 4)


def test_stopped_training_has_the_updates_of_all_batches_that_were_taken():
    stopped, alone = (models.compiled(models.mlp, IMAGES, models.keras_loss()) for _ in range(2))
    models.spread_fit(stopped, callback_for_mlp(), IMAGES, Ends(5))
    taken = updates_of(stopped)
    assert 5 <= taken <= models.BATCHES
    rows = taken * models.ROWS
    models.fit_spread(
        alone, callback_for_mlp(), models.X[:rows], models.Y[:rows], batch_size=models.ROWS, shuffle=False
    )
    assert updates_of(alone) == taken
    assert distance(stopped.get_weights(), alone.get_weights()) < 1e-6
    assert places(stopped) == {"CPU:0"}


def test_an_error_puts_all_back():
    """And the same callback trains the model again."""
    model = models.compiled(models.mlp, IMAGES, models.keras_loss())
    callback = models.in_small_functions(3, 4)
    start = model.get_weights()
    with pytest.raises(RuntimeError, match="stopped here"):
        models.spread_fit(model, callback, IMAGES, Ends(5, RuntimeError("stopped here")))
    assert places(model) == {"CPU:0"}
    assert distance(model.get_weights(), start) > 0
    updates = updates_of(model)
    model.fit(models.dataset(IMAGES), verbose=0, callbacks=[callback])  # spread as before
    assert updates_of(model) == updates + models.BATCHES
    assert places(model) == {"CPU:0"}
    assert all(np.isfinite(w).all() for w in model.get_weights())
