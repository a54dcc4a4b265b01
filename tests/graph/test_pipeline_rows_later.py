"""Rows that look at each other in later steps only: behind a count, behind a state, in a later batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import assert_equal_bits, distance, pipelined
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError
from tf_ooo.modes.pipeline.first_batch import LaterBatches

pytestmark = [pytest.mark.devices(2), needs_keras_3]

X = np.random.default_rng(0).normal(size=(104, 7)).astype("float32")
Y = X[:, :3] * 0.5
# Rows are far apart from the third batch of 16 on.
WIDE = X * np.where(np.arange(len(X)) < 32, 0.1, 3.0)[:, None].astype("float32")


def dense(*parts, kind=keras.Model):
    inputs = keras.Input((7,))
    out = keras.layers.Dense(13, "tanh", name="hidden")(inputs)
    for part in parts:
        out = part(out)
    return kind(inputs, keras.layers.Dense(3, name="out")(out))


def fit(model, *callbacks, loss="mse", optimizer=None, x=X, epochs=1):
    """With the count of steps that an optimizer was built with."""
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss)
    model.fit(
        x, Y[: len(x)], batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    )
    return model.get_weights()


def ours(**options):
    return pipelined("gpipe", devices=2, microbatches=4, **options)


def spread(p):
    return tf.reduce_sum(tf.math.reduce_variance(p, 0))


def counted(gate, term=lambda y, p: spread(p)):
    """A loss with a term behind a gate on the optimizer's count of steps."""
    optimizer = keras.optimizers.Adam(0.01)

    def loss(y, p):
        factor = tf.cast(gate(tf.convert_to_tensor(optimizer.iterations)), tf.float32)
        return tf.reduce_mean((y - p) ** 2) + factor * term(y, p)

    return {"loss": loss, "optimizer": optimizer}


def in_a_condition():
    optimizer = keras.optimizers.Adam(0.01)

    @tf.function
    def loss(y, p):
        late = tf.convert_to_tensor(optimizer.iterations) > 2
        return tf.reduce_mean((y - p) ** 2) + tf.cond(late, lambda: spread(p), lambda: 0.0)

    return {"loss": loss, "optimizer": optimizer}


def by_epochs():
    """A callback would set it."""
    epoch = tf.Variable(0, trainable=False)
    return {"loss": lambda y, p: tf.reduce_mean((y - p) ** 2) + tf.cast(epoch > 1, tf.float32) * spread(p)}


GATES = {
    "after": lambda: counted(lambda steps: steps > 3),
    "much-later": lambda: counted(lambda steps: steps > 20_000),
    "ramp": lambda: counted(lambda steps: tf.minimum(tf.cast(steps, tf.float32) / 1000.0, 1.0)),
    "every-eighth": lambda: counted(lambda steps: steps % 8 == 7),
    "condition": in_a_condition,
    "epochs": by_epochs,
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_on_the_count_of_steps(name):
    keras.utils.set_random_seed(1)
    model, settings = dense(), GATES[name]()
    before = model.get_weights()
    with pytest.raises(
        BackendError, match="as [0-9]+ steps later, the .*compares rows with one another"
    ) as raised:
        fit(model, ours(), **settings)
    assert "check_loss=False" in str(raised.value)
    assert_equal_bits(before, model.get_weights())
    if "optimizer" in settings:
        assert int(settings["optimizer"].iterations.numpy()) == 0


class Gate(keras.layers.Layer):
    """Its states change with each step; ``mixed``: what they let in."""

    def __init__(self, change, mixed, start=0.0, dtype_of_state="float32"):
        super().__init__()
        self.change, self.mixed, self.start, self.kind = change, mixed, start, dtype_of_state

    def build(self, shape):
        self.state = self.add_weight(
            shape=(1,), initializer=keras.initializers.Constant(self.start), dtype=self.kind, trainable=False
        )

    def call(self, x, training=False):
        before = tf.convert_to_tensor(self.state)
        self.state.assign(self.change(before, x))
        return x + self.mixed(before, x)


def softmax(x):
    return tf.nn.softmax(x, 0)


STATES = {
    "counter": (lambda s, x: s + 1, lambda s, x: tf.cast(s > 5, x.dtype) * softmax(x), 0, "int32"),
    "ramp": (lambda s, x: tf.minimum(s + 1e-3, 1.0), lambda s, x: tf.nn.relu(s - 0.5) * softmax(x)),
    "decay": (lambda s, x: 0.99 * s, lambda s, x: tf.nn.relu(0.2 - s) * softmax(x), 1.0),
    "average": (
        lambda s, x: 0.99 * s + 0.01 * tf.reduce_mean(tf.abs(x)),
        lambda s, x: tf.nn.relu(s - 0.05) * softmax(x),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_gate_on_a_state_that_each_step_changes(name):
    keras.utils.set_random_seed(1)
    model = dense(Gate(*STATES[name]))
    before = model.get_weights()
    with pytest.raises(BackendError, match="as [0-9]+ steps later, the .*compares rows"):
        fit(model, ours())
    assert_equal_bits(before, model.get_weights())


def warmed_up():
    return dense(), counted(lambda steps: steps > 2, lambda y, p: tf.reduce_mean(p**2))


def centred():
    """By a moving average, of the steps before."""
    return dense(Gate(lambda s, x: 0.9 * s + 0.1 * tf.reduce_mean(x), lambda s, x: -s / 4.0)), {}


def warming_layer():
    return dense(Gate(lambda s, x: s + 1.0, lambda s, x: tf.minimum(s / 3.0, 1.0) * tf.nn.softmax(x))), {}


def rows_of_a_table():
    """A number that is no count of steps, at other values of which the step fails."""
    place = tf.Variable(2, trainable=False)
    return dense(keras.layers.Lambda(lambda x: x + tf.gather(tf.constant([0.1, 0.2, 0.3]), place))), {}


TRAINED = {
    "warmed-up": warmed_up,
    "centred": centred,
    "warming-layer": warming_layer,
    "table": rows_of_a_table,
    "wide": lambda: (dense(), {"x": WIDE}),
    "schedule": lambda: (
        dense(),
        {"optimizer": keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 9))},
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_changes_from_step_to_step_by_itself(name):
    """The weights are those of stock, up to rounding."""
    trained = []
    for callbacks in ((), (ours(),)):
        keras.utils.set_random_seed(1)
        model, settings = TRAINED[name]()
        trained.append(fit(model, *callbacks, epochs=2, **settings))
        assert int(model.optimizer.iterations.numpy()) == 14
    assert distance(*trained) < 1e-4


def wide_rows(y, p):
    """A term that only rows have that are far apart."""
    return tf.reduce_mean((y - p) ** 2) + tf.nn.relu(tf.reduce_max(tf.abs(y - p)) - 1.0)


def count_of(model):
    return int(model.optimizer.iterations.numpy())


def test_rows_that_first_meet_in_a_later_batch():
    """Batch 4 is not trained; what was trained before are stock's steps, up to rounding."""
    keras.utils.set_random_seed(1)
    model = dense()
    with pytest.raises(BackendError, match="in batch 4, whose update was not made.*compares rows") as raised:
        fit(model, ours(), loss=wide_rows, x=WIDE)
    assert "looked at: loss wide_rows" in str(raised.value)
    assert count_of(model) == 3


def test_in_a_later_fit():
    """Batches are counted on."""
    keras.utils.set_random_seed(1)
    model, callback = dense(), ours()
    fit(model, callback, loss=wide_rows, x=WIDE[:32])
    with pytest.raises(BackendError, match="in batch 4, whose update was not made"):
        model.fit(WIDE[32:], Y[32:], batch_size=16, verbose=0, shuffle=False, callbacks=[callback])
    assert count_of(model) == 3


def test_one_device_goes_on_where_it_may():
    """From that batch on, with all that was trained."""
    keras.utils.set_random_seed(1)
    model, callback = dense(), ours(fall_back=True, compare=False)
    fit(model, callback, loss=wide_rows, x=WIDE)
    assert count_of(model) == 7
    assert "in batch 4" in callback.report.fallback_reason


def test_later_batches_are_not_looked_at_unless_the_first_one_is():
    keras.utils.set_random_seed(1)
    model = dense()
    fit(model, ours(check_loss=False), loss=wide_rows, x=WIDE)
    assert count_of(model) == 7


def test_a_batch_that_cannot_be_compared_is_a_note(monkeypatch):
    """There may be no memory for the whole model beside the stages."""
    monkeypatch.setattr(LaterBatches, "_difference", no_memory)
    keras.utils.set_random_seed(1)
    model, callback = dense(), ours()
    fit(model, callback)
    assert count_of(model) == 7
    assert "rows are not compared from batch 2 on: ResourceExhaustedError" in callback.report.summary()


def no_memory(*_):
    raise tf.errors.ResourceExhaustedError(None, None, "no room")
