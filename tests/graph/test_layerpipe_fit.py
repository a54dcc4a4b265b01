"""``model.fit`` with ``mode="layerpipe"``: what is reported, where cuts are, and what Keras adds to a fit."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.layerpipe_by_hand import BATCHES, by_hand, distance, perceptron, same
from tests.graph.layerpipe_fit import (
    convnet,
    fitted,
    fitted_spread,
    gelus,
    layerpipe,
    over_four,
    perceptron_batches,
    places,
    samples,
    shortcuts,
    state_of,
    updates_of,
)
from tests.graph.layerpipe_spread import fit_spread
from tests.zoo import KERAS_3, keras
from tf_ooo.compat import keras_variables
from tf_ooo.fit import timing

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(30)]


# -- what is reported ------------------------------------------------------------------------------

WAYS = {"stash": {}, "ema": {"weights": "ema"}, "pipedream": {"schedule": "pipedream"}}


class Reported:
    """A fit of an epoch with Adam, and what it reported."""

    def __init__(self, way):
        self.model, callback = convnet(keras.optimizers.Adam(0.01)), layerpipe(**WAYS[way])
        self.history = fitted_spread(self.model, callback, validation_data=samples())
        self.evaluated = self.model.evaluate(*samples(), verbose=0)[0]
        self.report = callback.report
        self.versions = callback.report.layerpipe["weight_version_bytes"]


@pytest.fixture(scope="module")
def reported():
    """Each way is trained once."""
    fits = {}

    def of(way):
        if way not in fits:
            fits[way] = Reported(way)
        return fits[way]

    return of


@pytest.mark.parametrize("way", WAYS)
def test_reports(reported, way):
    run = reported(way)
    report, model = run.report, run.model
    assert updates_of(model) == 5
    assert places(model) == {"CPU:0"}
    assert report.state.startswith("the rewritten step runs")
    planned = {row["name"]: row["delay_steps"] for row in report.layers}
    delays = report.layerpipe["delay_steps"]
    assert max(planned.values()) == 4
    assert set(delays) == {keras_variables.path_of(v) for v in model.trainable_variables}
    assert {path.rpartition("/")[0] for path in delays} == set(planned)
    assert all(late == planned[path.rpartition("/")[0]] for path, late in delays.items())
    assert run.history["val_loss"][-1] == pytest.approx(run.evaluated, rel=1e-5)
    assert "processor 2" in report.summary()
    assert "not that of synchronous training" in report.notes[0]


def test_what_takes_long_is_said(monkeypatch, capsys):
    """Each function of rounds is traced in its first call: as an epoch begins, in its middle, at its end."""
    monkeypatch.setattr(timing, "AFTER_S", 0.0)
    model, (x, y) = convnet("adam"), samples()
    model.fit(x, y, batch_size=8, callbacks=[layerpipe()], verbose=2)
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith(" s")]
    said = [line.removeprefix("tf_ooo: ").rpartition(": ")[0] for line in said]
    assert "spreading the step over 3 devices" in said
    rounds = [line for line in said if line.startswith("tracing the step with ")]
    assert rounds[0] == "tracing the step with one batch on its way, as an epoch begins"
    assert rounds[-1] == "tracing the step with one batch on its way"
    assert len(set(rounds)) == len(rounds)


def test_reports_of_ways_differ(reported):
    stash, ema = reported("stash"), reported("ema")
    assert stash.versions["ema"] == 0
    assert 0 < ema.versions["ema"] <= sum(w.nbytes for w in ema.model.get_weights())
    assert any("Adam" in note for note in ema.report.notes)
    assert any("BatchNormalization" in note for note in ema.report.notes)
    assert not same(stash.model.get_weights(), ema.model.get_weights())
    assert reported("pipedream").history["loss"] != stash.history["loss"]


# -- cuts ------------------------------------------------------------------------------------------

CUTS = {
    **{f"gelus {devices}": (gelus, {"devices": devices, "layers": 7}) for devices in (2, 3, 4)},
    "profiled": (convnet, {"costs": None, "schedule": "auto", "profile_steps": 1}),
    "shortcuts": (shortcuts, {"costs": None, "profile_steps": 1}),
    "convnet 4": (lambda: convnet("adam"), {"devices": 4}),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts_inside_every_kind_of_layer(name):
    """Delays as planned also where a layer's dW needs its own dO; and on the default path, which profiles."""
    make, options = CUTS[name]
    callback = layerpipe(**options)
    history = fitted_spread(make(), callback)
    planned = {row["name"]: row["delay_steps"] for row in callback.report.layers}
    delays = callback.report.layerpipe["delay_steps"]
    layers = {path: path if path in planned else path.rpartition("/")[0] for path in delays}
    assert set(layers.values()) == set(planned)
    assert {path: planned[layers[path]] for path in delays} == delays
    assert max(delays.values()) > 0
    assert 0 < history["loss"][-1] < 2


# -- what Keras adds -------------------------------------------------------------------------------


def test_average_of_weights():
    """Keras' use_ema averages the weights after each update, whatever the device."""
    model = perceptron()
    model.compile(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5), "mse", jit_compile=False)
    start = model.get_weights()
    fit_spread(model, over_four(), perceptron_batches())
    history = by_hand([6, 4, 2, 0], "stash", all_weights=True)
    assert len(history) == BATCHES + 1
    averages = [w.astype(np.float64) for w in start]
    for n, weights in enumerate(history[1:]):
        first = not n and KERAS_3  # Keras 2 averages the first weights with the initial ones
        averages = weights if first else [0.5 * a + 0.5 * w for a, w in zip(averages, weights, strict=True)]
    # fit puts the averages in their place at the end
    assert distance(model.get_weights(), averages) < 1e-6
    assert distance(averages, history[-1]) > 0.01


def test_one_device_is_stock():
    stock, ours = convnet("adam"), convnet("adam")
    expected = fitted(stock, keras.callbacks.Callback(), epochs=2)
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=1)
    assert fitted(ours, callback, epochs=2) == expected
    assert same(state_of(stock), state_of(ours))
    assert callback.report.fallback_reason == "there is one device: the stock step runs"


def test_dump_dir_holds_the_graph_after_each_pass(tmp_path):
    given = {"weights": "latest", "schedule": "pipedream", "unroll": 2, "dump_dir": tmp_path}
    fitted_spread(convnet(), layerpipe(2, **given))
    assert sorted(path.stem for path in tmp_path.glob("*.pbtxt")) == [
        "00_input",
        "01_gates",
        "02_later_weights",
        "03_cut",
    ]
    ranges = {"rounds_0_to_0", "rounds_0_to_1", "rounds_0_to_2", "rounds_1_to_2", "rounds_2_to_2"}
    assert {path.name for path in tmp_path.glob("rounds_*")} == ranges
    assert {path.stem for path in tmp_path.glob("rounds_*/*")} == {"00_input", "01_round", "02_waits"}
    # Each range has one, and full rounds have two more in one function.
    assert {path.name for path in tmp_path.glob("copy_*")} == {f"copy_{number}" for number in range(1, 8)}
    assert {path.stem for path in tmp_path.glob("copy_*/*")} == {"00_input", "01_waits", "02_reseed"}
    assert "AssignSubVariableOp" in (tmp_path / "03_cut.pbtxt").read_text()


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has no legacy optimizers")
@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_legacy_optimizers(name):
    """A fused update of a weight and its slots does what Keras' newer optimizer does."""

    def optimizer(kind):
        return kind.Adam(0.01) if name == "adam" else kind.SGD(0.05, momentum=0.9)

    newer, legacy = (
        fitted_spread(convnet(optimizer(kind)), layerpipe(4), epochs=2)["loss"]
        for kind in (keras.optimizers, keras.optimizers.legacy)
    )
    assert legacy == pytest.approx(newer, rel=1e-4)


def test_no_more_batches_than_steps_per_epoch():
    """The data are endless."""

    def endless():
        x, y = samples()
        while True:
            yield x[:16], y[:16]

    model = convnet()
    batches = tf.data.Dataset.from_generator(
        endless, output_signature=(tf.TensorSpec([16, 12, 12, 2]), tf.TensorSpec([16], tf.int32))
    )
    fit_spread(model, layerpipe(2), batches, steps_per_epoch=5, epochs=2)
    assert updates_of(model) == 10


class Codebook(keras.layers.Layer):
    """Hands the nearest of seven codes on; gradients pass it by (van den Oord et al. 2017)."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(7, shape[-1]), initializer="glorot_uniform", name="codes")

    def call(self, x):
        distances = tf.reduce_sum((x[:, None] - self.codes) ** 2, -1)
        nearest = tf.one_hot(tf.argmin(distances, 1), 7) @ self.codes
        self.add_loss(tf.reduce_mean((nearest - tf.stop_gradient(x)) ** 2))
        return x + tf.stop_gradient(nearest - x)


def test_a_measured_step_that_has_other_layers():
    """A fit was refused when its first steps had trained."""
    layers = [keras.layers.Dense(9, "tanh"), keras.layers.Dense(3), Codebook(), keras.layers.Dense(5, "tanh")]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(6)])
    model.compile("sgd", "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, profile_steps=1)
    model.fit(x, x, batch_size=8, verbose=0, callbacks=[callback])
    assert callback.report.layerpipe.rounds
    (note,) = [note for note in callback.report.notes if "divided into other layers" in note]
    assert "codes" in note
