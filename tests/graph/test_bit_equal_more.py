"""The same bits for other trainings: optimizers, steps of one's own, several losses, random state."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from classification import check_fit

import tf_ooo
from tests import zoo, zoo_more
from tests.same_bits import Training, assert_same_bits, assert_trains_alike
from tests.zoo import keras, layers, needs_keras_3

pytestmark = pytest.mark.takes(60)


@pytest.fixture(scope="module")
def mlp_with(request):
    """The MLP with that optimizer, trained in stock order."""
    return Training(lambda: zoo.compiled(zoo.mlp, request.param))


every_optimizer = pytest.mark.parametrize(
    "mlp_with", zoo.optimizers(*sorted(set(zoo.OPTIMIZERS) - {"adam"})), indirect=True
)


@every_optimizer
def test_optimizers(mlp_with):
    assert_trains_alike(mlp_with, mlp_with.plain)


@every_optimizer
def test_graphs_with_these_optimizers_are_classified(mlp_with):
    graph = check_fit(mlp_with.model, mlp_with.plain.rewrites)
    assert len(graph.layers) == 4
    assert all(layer.update_ops for layer in graph.layers)


@pytest.mark.parametrize("name", ["mlp", "lstm_gru"])
def test_several_steps_per_execution(name):
    training = Training(lambda: zoo.compiled(zoo.SMALL[name], steps_per_execution=2))
    assert_trains_alike(training, training.plain)


def test_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        training = Training(lambda: zoo.compiled(zoo.mlp))
        assert_trains_alike(training, training.plain)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("name", ["mlp", "lstm_gru"])
def test_a_model_without_variables_before_its_first_step(name):
    """Keras makes the optimizer's in the first trace, and traces a second time."""
    training = Training(lambda: zoo.compiled(zoo.SMALL[name]), fresh=True)
    assert_trains_alike(training, training.ours(profile_steps=2))


class Autoencoder(keras.Model):
    """A train_step of its own: two losses, clipping in the step, its own metric."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(5, activation="tanh")
        self.decoder = keras.layers.Dense(7)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.decoder(self.encoder(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            code = self.encoder(x)
            rebuilt = tf.reduce_mean(tf.square(self.decoder(code) - x))
            loss = rebuilt + 0.1 * tf.reduce_mean(tf.abs(code))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "norm": norm}

    @property
    def metrics(self):
        return [self.tracker]


def test_custom_train_step():
    def build():
        model = Autoencoder()
        model.build((None, 7))
        return model, zoo.features(7), zoo.labels()

    training = Training(lambda: zoo.compiled(build, metrics=None), fresh=True)
    assert_trains_alike(training, training.ours(profile_steps=2))


@needs_keras_3
def test_gan():
    """Two networks, two optimizers; seeded noise is the only data that the generator sees."""

    def make():
        keras.utils.set_random_seed(7)
        return zoo_more.gan()

    training = Training(make, fresh=True)
    ours = training.ours(profile_steps=2)
    assert_trains_alike(training, ours)
    graph = check_fit(training.model, ours.rewrites)
    assert len(graph.layers) == 4


class Noisy(keras.Model):
    """Draws from TensorFlow's op-held random state, as many GAN and VAE scripts do."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(9, activation="relu"), keras.layers.Dense(3)])
        self.inner.build((None, 7))

    def call(self, x):
        return self.inner(x + tf.random.normal(tf.shape(x)))


def test_op_held_random_state_is_drawn_from_by_one_function_only():
    """The op's seed counts ops: each fit needs a model of its own."""
    training = Training(lambda: zoo.compiled(lambda: (Noisy(), zoo.features(7), zoo.labels())), fresh=True)
    named = training.ours(profile_steps=2)
    assert_trains_alike(training, named)
    assert "random" not in named.report.fallback_reason
    auto = training.ours(schedule="auto", profile_steps=2)
    assert_same_bits(training.stock, auto.trained)
    assert auto.report.fell_back
    assert "random" in auto.report.fallback_reason


class GAN(keras.Model):
    """Two networks, two optimizers, one step: the generator's loss reads what the critic's update wrote."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(9, activation="relu"), layers.Dense(7)]
        )
        self.critic = keras.Sequential(
            [keras.Input((7,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.tracker = keras.metrics.Mean(name="loss")

    def compile(self, own, critics):
        super().compile(jit_compile=False)
        self.optimizers = self.own, self.critics = own, critics
        own.build(self.generator.trainable_variables)
        critics.build(self.critic.trainable_variables)

    def call(self, x):
        return self.critic(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        noise = keras.random.normal((tf.shape(data)[0], 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.generator(noise)) - self.critic(data))
        weights = self.critic.trainable_variables
        self.critics.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fooled = -tf.reduce_mean(self.critic(self.generator(noise)))
        weights = self.generator.trainable_variables
        self.own.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
        self.tracker.update_state(loss + fooled)
        return {"loss": self.tracker.result()}


def wasserstein():
    keras.utils.set_random_seed(7)
    model = GAN()
    model.compile(keras.optimizers.Adam(1e-2), keras.optimizers.SGD(1e-2, momentum=0.9))
    return model, zoo.features(7), None


def two_outputs():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((7,))
    shared = layers.Dense(9, activation="relu")(inputs)
    outputs = {"kind": layers.Dense(3, name="kind")(shared), "size": layers.Dense(1, name="size")(shared)}
    model = keras.Model(inputs, outputs)
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    model.compile("adam", losses, loss_weights={"kind": 1.0, "size": 0.3}, jit_compile=False)
    return model, zoo.features(7), {"kind": zoo.labels(), "size": zoo.features(1)}


ROWS = np.linspace(0.1, 2.0, zoo.BATCH).astype("float32")
SAMPLE_WEIGHT = {"kind": ROWS, "size": ROWS[::-1].copy()}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(wasserstein, {}, marks=needs_keras_3),
        (two_outputs, {}),
        (two_outputs, {"sample_weight": SAMPLE_WEIGHT}),
    ],
    ids=["wasserstein", "two_outputs", "with_sample_weight"],
)
def test_several_losses_and_optimizers(make, options):
    """In a named order, and in turns with the stock step."""
    training = Training(make, fresh=True, **options)
    assert_trains_alike(training, training.plain)
    auto = training.ours(schedule="auto", profile_steps=2)
    assert_same_bits(training.stock, auto.trained)
    assert auto.report.stock_step_s > 0
    assert auto.report.added_edges == training.plain.report.added_edges
    assert auto.report.ops["dW"] > 0


@pytest.mark.parametrize("options", [{"schedule": "fast_forward"}, {"schedule": "auto", "compare": True}])
def test_what_a_callback_changes_between_steps_changes_no_trace(options):
    """A stock step is traced once, in the first step; so are both of ours."""

    def freeze_after_the_first_step():
        def freeze(batch, logs):
            model.layers[-1].trainable = False
            model.layers[0].activation = keras.activations.linear

        return keras.callbacks.LambdaCallback(on_train_batch_end=freeze)

    results = []
    for ours in ([], [tf_ooo.OOOBackprop(profile_steps=2, **options)]):
        model, x, y = zoo.compiled(zoo.mlp)
        model.fit(x, y, batch_size=1, epochs=2, verbose=0, callbacks=[*ours, freeze_after_the_first_step()])
        results.append([weight.tobytes() for weight in model.get_weights()])
    assert results[0] == results[1]
    assert ours[0].report.moved_ops > 0


@needs_keras_3  # Keras 2's Dropout draws from a state that each function has of its own
def test_a_pass_that_fails_on_a_retrace_of_fit(monkeypatch, caplog):
    """The same callback, batches of another fixed size: planned again, which fails from then on."""
    from grappler_passes.passes.rewrite_plan import OrderPass

    run, failing, trained = OrderPass.run, [], []

    def late(self, graph_def, training_graph):
        if failing:
            raise ValueError("late boom")
        return run(self, graph_def, training_graph)

    monkeypatch.setattr(OrderPass, "run", late)
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0)
    for callbacks in ([], [callback]):
        failing.clear()
        model, x, y = zoo.compiled(zoo.mlp)
        zoo.make_variables(model, x, y)
        data = tf.data.Dataset.from_tensor_slices((x, y)).repeat(4)
        for size in (2, 3):
            batches = data.batch(size, drop_remainder=True)
            model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)
            failing.append(size)
        trained.append(model.get_weights())
    for a, b in zip(*trained, strict=True):
        np.testing.assert_array_equal(a, b)
    assert "late boom" in callback.report.fallback_reason
    assert len([r for r in caplog.records if "late boom" in r.getMessage()]) == 1
