"""More models than the small ones of ``zoo.py``: those on which classification once went wrong in ``fit``.

Each function returns ``(model, x, y)``, compiled by ``zoo.compiled`` or, where it has a step of its
own, compiled already.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.zoo import BATCH, CLASSES, KERAS_3, features, keras, labels, layers, stack, tokens


def time_distributed_lstm():
    return stack(features(4, 5, 3), layers.TimeDistributed(layers.LSTM(6)), layers.GRU(5))


def bidirectional_gru():
    return stack(
        tokens(6),
        layers.Embedding(11, 8, mask_zero=True),
        layers.Bidirectional(layers.GRU(5, return_sequences=True, dropout=0.2)),
        layers.Bidirectional(layers.GRU(4), merge_mode="sum"),
    )


def conv_lstm():
    return stack(
        features(4, 8, 8, 2),
        layers.ConvLSTM2D(3, 3, return_sequences=True),
        layers.ConvLSTM2D(4, 3, padding="same"),
        layers.GlobalAveragePooling2D(),
    )


def rnn_of_cells():
    return stack(features(5, 4), layers.RNN([layers.LSTMCell(6), layers.GRUCell(5, reset_after=False)]))


def simple_rnn():
    # Keras 2 draws the masks of recurrent dropout inside the loop, whose turns run side by side: no run
    # repeats another.
    dropped = 0.1 if KERAS_3 else 0.0
    return stack(
        features(6, 4),
        layers.SimpleRNN(6, return_sequences=True, recurrent_dropout=dropped),
        layers.BatchNormalization(),
        layers.LSTM(5, go_backwards=True),
    )


def spectral():
    """The kernel is normalized, and written, in the forward pass."""
    return stack(
        features(10, 10, 3),
        layers.SpectralNormalization(layers.Conv2D(8, 3)),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.SpectralNormalization(layers.Dense(7)),
    )


def several_inputs():
    a, b, c = keras.Input((8,)), keras.Input((6,)), keras.Input((9, 9, 2))
    x = layers.Dense(7, activation="relu")(a)
    y = layers.GRU(5)(layers.Embedding(11, 4)(b))
    z = layers.GlobalAveragePooling2D()(layers.SeparableConv2D(5, 3)(c))
    h = layers.Dense(10, activation="elu")(layers.Concatenate()([x, y, z]))
    return (
        keras.Model([a, b, c], layers.Dense(CLASSES)(h)),
        [features(8), tokens(6), features(9, 9, 2)],
        labels(),
    )


def seq2seq():
    source, target = keras.Input((7,)), keras.Input((5,))
    encoded, h, c = layers.LSTM(6, return_sequences=True, return_state=True)(layers.Embedding(11, 8)(source))
    decoder = layers.LSTM(6, return_sequences=True)
    decoded = decoder(layers.Embedding(11, 8, mask_zero=True)(target), initial_state=[h, c])
    attended = layers.Attention(use_scale=True)([decoded, encoded])
    outputs = layers.Dense(CLASSES)(layers.Concatenate()([decoded, attended]))
    return keras.Model([source, target], outputs), [tokens(7), tokens(5)], tokens(5, size=CLASSES)


def unet():
    inputs = keras.Input((16, 16, 3))
    h, skips = inputs, []
    for channels in (4, 7, 9):
        h = layers.BatchNormalization()(layers.Conv2D(channels, 3, padding="same")(h))
        h = layers.ReLU()(h)
        skips.append(h)
        h = layers.MaxPooling2D()(h)
    h = layers.Conv2D(11, 3, padding="same", activation="relu")(h)
    for channels, skip in zip((9, 7, 4), reversed(skips), strict=True):
        h = layers.Conv2DTranspose(channels, 2, strides=2, padding="same")(h)
        h = layers.Conv2D(channels, 3, padding="same", activation="swish")(layers.Concatenate()([h, skip]))
    model = keras.Model(inputs, layers.Conv2D(CLASSES, 1)(h))
    return model, features(16, 16, 3), tokens(16, 16, size=CLASSES)


def only_an_embedding():
    frozen = layers.Dense(CLASSES, trainable=False)
    model = keras.Sequential([keras.Input((4,)), layers.Embedding(11, 4), layers.Flatten(), frozen])
    return model, tokens(4), labels()


def only_a_kernel():
    frozen = layers.Dense(5, activation="relu", trainable=False)
    model = keras.Sequential([keras.Input((7,)), frozen, layers.Dense(CLASSES, use_bias=False)])
    return model, features(7), labels()


class Gan(keras.Model):
    """The pattern of keras.io: fresh noise from ``keras.random`` and a seed of the model's own."""

    def __init__(self):
        super().__init__()
        hidden = {"activation": "relu"}
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(8, **hidden), layers.Dense(7)])
        self.critic = keras.Sequential([keras.Input((7,)), layers.Dense(9, **hidden), layers.Dense(1)])
        self.seed = keras.random.SeedGenerator(3)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self):
        super().compile(jit_compile=False)
        self.optimizers = keras.optimizers.Adam(), keras.optimizers.RMSprop()

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.critic(x)

    def train_step(self, data):
        real = data[0]
        loss = self.critic_step(real) + self.generator_step(tf.shape(real)[0])
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def critic_step(self, real):
        noise = keras.random.normal((tf.shape(real)[0], 4), seed=self.seed)
        with tf.GradientTape() as tape:
            right, wrong = self.critic(real), self.critic(self.generator(noise))
            loss = self.entropy(tf.ones_like(right), right) + self.entropy(tf.zeros_like(wrong), wrong)
        variables = self.critic.trainable_variables
        self.optimizers[0].apply(tape.gradient(loss, variables), variables)
        return loss

    def generator_step(self, count):
        noise = keras.random.normal((count, 4), seed=self.seed)
        with tf.GradientTape() as tape:
            answer = self.critic(self.generator(noise))
            loss = self.entropy(tf.ones_like(answer), answer)
        variables = self.generator.trainable_variables
        self.optimizers[1].apply(tape.gradient(loss, variables), variables)
        return loss


def gan():
    model = Gan()
    model.compile()
    return model, features(7), np.zeros((BATCH, 1), "float32")


class WeightNormalized(layers.Layer):
    """A convolution whose kernel is computed from two weights; oneDNN makes one kernel of its gradients."""

    def __init__(self, count, **kwargs):
        super().__init__(**kwargs)
        self.count = count

    def build(self, shape):
        self.v = self.add_weight(shape=(3, 3, shape[-1], self.count), name="v")
        self.g = self.add_weight(shape=(self.count,), initializer="ones", name="g")
        self.bias = self.add_weight(shape=(self.count,), initializer="zeros", name="bias")

    def call(self, x):
        kernel = tf.nn.l2_normalize(self.v, axis=(0, 1, 2)) * self.g
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "VALID"), self.bias))


def weight_normalized():
    return stack(
        features(9, 9, 2), layers.Conv2D(3, 3), WeightNormalized(5), WeightNormalized(4), layers.Flatten()
    )


MORE = {
    f.__name__: f
    for f in (
        time_distributed_lstm, bidirectional_gru, conv_lstm, rnn_of_cells, simple_rnn, spectral,
        several_inputs, seq2seq, unet, only_an_embedding, only_a_kernel,
        weight_normalized,
    )
}  # fmt: skip
if not KERAS_3:  # Keras 2.15's own SpectralNormalization fails in fit
    del MORE["spectral"]
