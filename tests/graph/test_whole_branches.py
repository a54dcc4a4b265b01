"""Steps with loops and branches that TensorFlow leaves as one op, or types that its fused ops do not name."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests import zoo
from tests.same_bits import Training, assert_ordered, assert_same_bits, assert_trains_alike
from tests.zoo import keras, layers, needs_keras_3

pytestmark = pytest.mark.takes(40)


def ctc():
    """Its loss is two loops that Grappler does not lower."""
    keras.utils.set_random_seed(7)
    hidden = [layers.Conv1D(16, 3, padding="same", activation="relu"), layers.Dense(16, activation="tanh")]
    model = keras.Sequential([keras.Input((12, 5)), *hidden, layers.Dense(6)])
    model.compile("adam", keras.losses.CTC(), jit_compile=False)
    targets = np.random.default_rng(3).integers(1, 6, (zoo.BATCH, 4))
    return model, zoo.features(12, 5), targets


@needs_keras_3
@pytest.mark.parametrize("schedule", ["fast_forward", "auto"])
def test_ctc(schedule):
    # TensorFlow keeps the loops of the first trace, and does not optimize a graph with another batch size.
    training = Training(ctc, fresh=True)
    if schedule == "fast_forward":
        assert_trains_alike(training, training.plain)
    else:
        auto = training.ours(schedule="auto", profile_steps=2)
        assert_same_bits(training.stock, auto.trained)
        assert auto.report.moved_ops > 0


def ctc_of(value):
    logits = tf.reshape(value, (8, 3, 4))
    labels = tf.ones((8, 2), tf.int32)
    lengths = tf.fill([8], 3)
    return tf.nn.ctc_loss(labels, logits, tf.fill([8], 2), lengths, logits_time_major=False, blank_index=0)


def graph_of(function, *arguments):
    return tf.function(function).get_concrete_function(*arguments)


def whole_while(value):
    def body(i, x):
        return i + 1, x * 0.9

    specs = tf.TensorSpec((), tf.int32), tf.TensorSpec(value.shape, tf.float32)
    runs, body = graph_of(lambda i, x: i < 3, *specs), graph_of(body, *specs)
    return tf.raw_ops.StatelessWhile(input=(tf.constant(0), value), cond=runs, body=body)[1]


def whole_if(value):
    spec = tf.TensorSpec(value.shape, tf.float32)
    then, other = graph_of(lambda x: x * 0.5, spec), graph_of(lambda x: x + 1.0, spec)
    is_large = tf.reduce_sum(value) > 1.0
    return tf.raw_ops.StatelessIf(
        cond=is_large, input=[value], Tout=[tf.float32], then_branch=then, else_branch=other
    )[0]


def whole_case(value):
    spec = tf.TensorSpec(value.shape, tf.float32)
    branches = [graph_of(lambda x, by=by: x * by, spec) for by in (0.5, 1.5, 2.5)]
    which = tf.cast(tf.reduce_sum(value) > 1.0, tf.int32)
    return tf.raw_ops.StatelessCase(branch_index=which, input=[value], Tout=[tf.float32], branches=branches)[
        0
    ]


def train(decorate, within, steps=8):
    """A net of three layers; what is ``within`` stands on its input, or at its end."""
    sizes = ((6, 5), (5, 5), (5, 12))
    weights = [tf.Variable(np.random.default_rng(1).normal(size=size).astype("float32")) for size in sizes]
    x = tf.constant(np.random.default_rng(0).normal(size=(8, 6)).astype("float32"))

    def step(x):
        with tf.GradientTape() as tape:
            value = x if within is ctc_of else within(x)
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean(ctc_of(value) if within is ctc_of else (value - 1.0) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    step = decorate(step)
    losses = [float(step(x)) for _ in range(steps)]
    return losses, [weight.numpy().tobytes() for weight in weights], step


def check_step(within):
    stock = train(tf.function, within)
    ours = train(tf_ooo.function(schedule="fast_forward", strict=True), within)
    assert ours[:2] == stock[:2]
    assert_ordered(ours[2].report)


@pytest.mark.parametrize("within", [whole_while, whole_if, whole_case])
def test_steps_with_functional_control_flow(within):
    check_step(within)


@pytest.mark.alone  # as above: its loops are those of the process' first trace
def test_a_step_with_ctc_loss():
    check_step(ctc_of)


def with_cases(decorate, steps=8):
    """A layer is one of three, two of which have weights."""
    rng = np.random.default_rng(2)
    weights = [tf.Variable(rng.normal(size=(5, 5)).astype("float32")) for _ in range(5)]

    def step(x):
        with tf.GradientTape() as tape:
            below = tf.tanh(x @ weights[0])
            layers_ = [
                lambda: tf.tanh(below @ weights[1]),
                lambda: tf.nn.relu(below @ weights[2]),
                lambda: below * 2.0,
            ]
            which = tf.cast(tf.reduce_sum(x) > 0.0, tf.int32) + tf.cast(tf.reduce_sum(x) > 1.0, tf.int32)
            above = tf.tanh(tf.switch_case(which, layers_) @ weights[3])
            loss = tf.reduce_mean((above @ weights[4] - 1.0) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    step = decorate(step)
    batches = rng.normal(size=(steps, 8, 5)).astype("float32")
    losses = [float(step(tf.constant(batch))) for batch in batches]
    return losses, [weight.numpy().tobytes() for weight in weights], step


def test_three_branches_that_tensorflow_lowers():
    stock, ours = with_cases(tf.function), with_cases(tf_ooo.function(schedule="fast_forward", strict=True))
    assert ours[:2] == stock[:2]
    assert ours[2].report.unclassified == {}
    assert_ordered(ours[2].report)


def bfloat16_convolutions():
    """oneDNN fuses them with their biases; the fused op's definition does not name bfloat16."""
    keras.utils.set_random_seed(7)
    convolutions = [layers.Conv2D(8, 3, activation="relu"), layers.Conv2D(6, 3, strides=2, padding="same")]
    model = keras.Sequential([keras.Input((9, 9, 3)), *convolutions, layers.Flatten(), layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model, zoo.features(9, 9, 3), zoo.labels()


def test_bfloat16_convolutions():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        training = Training(bfloat16_convolutions)
        assert_trains_alike(training, training.plain)
    finally:
        keras.mixed_precision.set_global_policy("float32")
