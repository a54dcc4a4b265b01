"""Models of many kinds, and training them by hand with gradients that come late."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.graph.layerpipe_by_hand import distance
from tests.graph.layerpipe_fit import layerpipe, trained_weights
from tests.graph.layerpipe_spread import fit_spread
from tests.zoo import keras
from tf_ooo.compat import keras_compiled, keras_variables

RATE, BATCHES, ROWS = 0.2, 14, 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS * BATCHES - 5, 7)).astype("float32")  # the last batch is smaller
WORDS = RNG.integers(0, 29, size=(len(X), 6))
Y = RNG.integers(0, 3, len(X))


def crossentropy(y, outputs):
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=tf.cast(outputs, tf.float32))
    return tf.reduce_mean(loss)


def squared(y, outputs):
    return tf.reduce_mean(tf.square(outputs - tf.one_hot(y, 3)))


class Tied(keras.Model):
    """An embedding that is the output's kernel too."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(29, 8)
        self.middle = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(8)]

    def call(self, words):
        hidden = self.embedding(words)
        for layer in self.middle:
            hidden = hidden + layer(hidden)
        return tf.tensordot(hidden, tf.transpose(self.embedding.embeddings), 1)


def embedded():
    """The embedding's gradient is IndexedSlices."""
    layers = [keras.layers.Embedding(29, 8), keras.layers.Flatten(), keras.layers.Dense(9, activation="relu")]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


def two_inputs():
    a, b = keras.Input((7,)), keras.Input((6,))
    left = keras.layers.Dense(11, activation="relu")(a)
    right = keras.layers.Dense(13, activation="relu")(b)
    both = keras.layers.Dense(10, activation="tanh")(keras.layers.Concatenate()([left, right]))
    return keras.Model([a, b], keras.layers.Dense(3)(both))


def mlp():
    layers = [keras.layers.Dense(width, activation="relu") for width in (33, 21, 17)]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def normalized():
    """Normalizations' scales have gradients as late as their layers'."""
    layers = [
        keras.layers.Reshape((7, 1, 1)),
        keras.layers.Conv2D(5, (3, 1), padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(11, activation="relu"),
        keras.layers.LayerNormalization(),
    ]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def used_twice():
    """The second layer's weights are the fourth's too."""
    shared = keras.layers.Dense(9, activation="tanh")
    inputs = keras.Input((7,))
    x = shared(keras.layers.Dense(9, activation="tanh")(inputs))
    x = shared(keras.layers.Dense(9, activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


class Custom(keras.Model):
    """A train_step of its own that returns a loss which is no metric."""

    def __init__(self):
        super().__init__()
        self.inside = [
            keras.layers.Dense(12, activation="relu"),
            keras.layers.Dense(9),
            keras.layers.Dense(3),
        ]

    def call(self, x, training=False):
        for layer in self.inside:
            x = layer(x)
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = squared(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Scaled(keras.layers.Layer):
    """Its gradient is a product with each number by itself: no op of it takes whole rows."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


def scaled():
    layers = [keras.layers.Dense(9, activation="tanh"), Scaled(), keras.layers.Dense(8, activation="tanh")]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def transposed():
    layers = [
        keras.layers.Reshape((7, 1, 1)),
        keras.layers.Conv2DTranspose(5, (3, 1), padding="same", activation="tanh", name="first"),
        keras.layers.Conv2DTranspose(6, (3, 2), strides=(2, 1), activation="tanh", name="second"),
        keras.layers.Flatten(),
    ]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3, name="last")])


def two_heads():
    """An odd model: a table that is used twice, a gate, two outputs of different sizes."""
    words = keras.Input((6,))
    table = keras.layers.Embedding(29, 8)
    x = keras.layers.Flatten()(table(words))
    gate = keras.layers.Dense(5, activation="sigmoid")(keras.layers.GlobalAveragePooling1D()(table(words)))
    x = keras.layers.Dense(5, activation="tanh")(x)
    x = keras.layers.multiply([x, gate])
    return keras.Model(words, [keras.layers.Dense(3, name="kind")(x), keras.layers.Dense(1, name="size")(x)])


# -- training --------------------------------------------------------------------------------------


def batches(data):
    starts = range(0, len(X), ROWS)
    return [tf.nest.map_structure(lambda part, n=n: part[n : n + ROWS], data) for n in starts]


def compiled(make, data, loss=None, optimizer=None, **options):
    """A model, built, that is compiled for a Keras loss."""
    keras.utils.set_random_seed(3)
    model = make()
    given = {"metrics": ["accuracy"] if loss else None} | options
    model.compile(optimizer or keras.optimizers.SGD(RATE), loss, jit_compile=False, **given)
    model(batches(data)[0][0])
    return model


def keras_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def layers_of(model):
    return len({keras_variables.path_of(v).rpartition("/")[0] for v in model.trainable_variables})


def spread_fit(model, callback, data, *more, **arguments):
    """Fit on batches whose last is smaller."""
    return fit_spread(model, callback, dataset(data), callbacks=more, **arguments)


def dataset(data):
    signature = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), data)
    return tf.data.Dataset.from_generator(lambda: iter(batches(data)), output_signature=signature)


def in_small_functions(devices, layers, **options):
    """Two rounds in one function: with as many as there could be these take longer to trace."""
    return layerpipe(devices, layers, unroll=2, **options)


def late_steps(model, callback):
    """Return how late the gradients of each trained variable are."""
    delays = callback.report.layerpipe["delay_steps"]
    return [delays[keras_variables.path_of(v)] for v in model.trainable_variables]


def assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class ByHand:
    """Training in which each variable's gradients are so many steps late.

    Args:
        make: of the model.
        data: a nest of arrays; of each batch the first part is the model's input.
        loss: of the rest of a batch and the outputs.
        optimizer: a function that makes one; None: plain gradient descent by hand.
    """

    def __init__(self, make, data, loss, optimizer=None):
        self.data, self.loss, self.optimizer = data, loss, optimizer
        self.model = compiled(make, data)
        self.start = trained_weights(self.model)
        self.gradients = tf.function(self._gradients, reduce_retracing=True)

    def _gradients(self, x, *rest):
        with tf.GradientTape() as tape:
            value = self.loss(*rest, self.model(x, training=True))
        variables = [keras_variables.value_of(v) for v in self.model.trainable_variables]
        return tape.gradient(value, variables)

    def late(self, delays):
        """The final weights."""
        variables = self.model.trainable_variables
        optimizer = self._built()
        history = [self.start]
        for number, batch in enumerate(batches(self.data)):
            seen = [history[max(0, number - delay)][place] for place, delay in enumerate(delays)]
            assign(variables, seen)
            history.append(self._updated(optimizer, history[-1], self.gradients(*batch)))
        return history[-1]

    def _built(self):
        if self.optimizer is None:
            return None
        optimizer = self.optimizer()
        optimizer.build(self.model.trainable_variables)
        return optimizer

    def _updated(self, optimizer, weights, gradients):
        if optimizer is None:
            dense = [tf.convert_to_tensor(g).numpy() for g in gradients]
            return [w - RATE * g for w, g in zip(weights, dense, strict=True)]
        variables = self.model.trainable_variables
        assign(variables, weights)
        keras_compiled.update(optimizer, gradients, variables)
        return trained_weights(self.model)


def _dense_mean(gradients):
    return tf.add_n([tf.convert_to_tensor(g) for g in gradients]) / len(gradients)


def assert_late_as_by_hand(model, callback, by_hand, most, limit=2e-6):
    """Trained weights are those of late gradients by hand, and far from those of gradients in time."""
    late = late_steps(model, callback)
    assert max(late) == most
    expected, in_time = by_hand.late(late), by_hand.late([0] * len(late))
    away = distance(trained_weights(model), expected)
    assert away < limit
    assert distance(trained_weights(model), in_time) > max(100 * away, 1e-4)
