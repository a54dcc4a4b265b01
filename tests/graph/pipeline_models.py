"""Models that are cut into stages, and their data: sizes are odd and unequal on purpose."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.zoo import keras

layers = keras.layers


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def whole(high, *shape):
    return np.random.default_rng(1).integers(0, high, shape)


X_UNEVEN, Y_UNEVEN = normal(52, 7), whole(3, 52)
X, Y = X_UNEVEN[:48], Y_UNEVEN[:48]
EVEN, UNEVEN = (X, Y), (X_UNEVEN, Y_UNEVEN)
IMAGES = normal(48, 9, 9, 2)
WORDS = whole(29, 48, 6)
NEXT_WORDS = np.roll(WORDS, 1, 1)
TWO_TEXTS = ([WORDS.astype("int32"), WORDS[:, ::-1][:, :4].astype("int32")], Y)


def adam():
    return keras.optimizers.Adam(0.01)


def adam_of_larger_gradients():
    """With its own small epsilon Adam makes much of gradients that are nearly 0.

    Sums in another order, as those of the unsplit batch are, move weights by 5e-4 then.
    """
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def momentum():
    """Sees a factor on all gradients, which Adam does not."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def mlp():
    return keras.Sequential(
        [
            keras.Input((7,)),
            layers.Dense(33, activation="relu"),
            layers.Dense(21, activation="gelu"),
            layers.Dense(17),
            layers.Dense(3),
        ]
    )


def eight_layers(activation="tanh"):
    hidden = [layers.Dense(width, activation=activation) for width in (33, 21, 17, 40, 9, 13, 29)]
    return keras.Sequential([keras.Input((7,)), *hidden, layers.Dense(3)])


def deep():
    """Sixteen layers and an output: stages for 8 devices in a V."""
    widths = [33, 21, 17, 40, 9, 13, 29, 31, 11, 27, 19, 23, 37, 15, 25, 35]
    hidden = [layers.Dense(width, activation="tanh") for width in widths]
    return keras.Sequential([keras.Input((7,)), *hidden, layers.Dense(3)])


class Positions(layers.Layer):
    """Tokens and positions, as Keras' examples have them: no data choose the rows of the second."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(50, 6), layers.Embedding(7, 6)

    def call(self, x):
        return self.tokens(x) + self.positions(tf.range(x.shape[-1]))


def positions():
    """Adam squares each slice of a sparse gradient by itself: a position must come once, as in one batch."""
    inputs = keras.Input((7,), dtype="int32")
    x = Positions()(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x))
    return keras.Model(inputs, layers.Dense(3)(x[:, 0]))


def deep_unet():
    """17 convolutions, three skips."""
    same = {"padding": "same"}
    inputs = x = keras.Input((16, 16, 3))
    skips = []
    for channels in (6, 10, 14):
        x = layers.Conv2D(channels, 3, activation="relu", **same)(x)
        skips.append(layers.Conv2D(channels, 3, activation="gelu", **same)(x))
        x = layers.MaxPooling2D()(skips[-1])
    x = layers.Conv2D(18, 3, activation="relu", **same)(x)
    for channels in (14, 10, 6):
        x = layers.Conv2DTranspose(channels, 2, strides=2, **same)(x)
        x = layers.Concatenate()([x, skips.pop()])
        x = layers.Conv2D(channels, 3, activation="relu", **same)(x)
        x = layers.Conv2D(channels, 3, use_bias=False, **same)(x)
    return keras.Model(inputs, layers.Conv2D(4, 1)(x))


class TiedTransformer(keras.Model):
    """Some blocks; the tokens' embedding is the output layer's kernel too."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embedding = Positions()
        self.attention = [layers.MultiHeadAttention(2, 3) for _ in range(blocks)]
        self.inner = [layers.Dense(20, activation="gelu") for _ in range(blocks)]
        self.outer = [layers.Dense(6) for _ in range(blocks)]

    def call(self, x):
        h = self.embedding(x)
        for attention, inner, outer in zip(self.attention, self.inner, self.outer, strict=True):
            h = h + attention(h, h)
            h = h + outer(inner(h))
        return tf.matmul(h, self.embedding.tokens.embeddings, transpose_b=True)


def conv_with_skips():
    """A small U-Net: two skips, pooling, upsampling."""
    inputs = keras.Input((9, 9, 2))
    a = layers.Conv2D(5, 3, padding="same", activation="relu")(inputs)
    b = layers.Conv2D(7, 3, strides=3, padding="same", activation="relu")(a)
    c = layers.Conv2D(6, 3, padding="same")(b)
    # One bias for the two: oneDNN would compute it with whichever kernel comes first in a graph.
    d = layers.Add()([layers.Conv2D(6, 1, use_bias=False)(b), c])
    e = layers.Concatenate()([layers.UpSampling2D(3)(d), a])
    f = layers.Conv2D(4, 3, padding="same", activation="gelu")(e)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(f)))


class Tied(keras.Model):
    """An embedding that is the output's kernel too."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(29, 8)
        self.middle = [layers.Dense(8, activation="relu"), layers.Dense(8)]
        self.norm = layers.LayerNormalization()

    def call(self, words):
        hidden = self.embedding(words)
        for layer in self.middle:
            hidden = hidden + layer(hidden)
        return tf.tensordot(self.norm(hidden), tf.transpose(self.embedding.embeddings), 1)


def used_twice():
    """A layer below another and above it again, and one at the bottom of a second branch."""
    again = layers.Dense(12, activation="relu")
    a, b = keras.Input((7,)), keras.Input((6,))
    x = again(layers.Dense(15)(again(layers.Dense(15)(a))))
    y = layers.Dense(12, activation="tanh")(layers.LayerNormalization()(b))
    return keras.Model([a, b], layers.Dense(3)(layers.Dense(10)(x * y)))


def untied_embedding():
    """Its gradient is IndexedSlices."""
    parts = [layers.Embedding(29, 8), layers.Flatten(), layers.Dense(9), layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *parts])


def siamese():
    """One table for two texts: TensorFlow joins the rows of both lookups with those of the micro-batches."""
    texts = [keras.Input((6,), dtype="int32"), keras.Input((4,), dtype="int32")]
    table, hidden = layers.Embedding(29, 10), layers.Dense(13, activation="relu")
    halves = [layers.GlobalAveragePooling1D()(hidden(table(text))) for text in texts]
    both = layers.Dense(17, activation="relu")(layers.Concatenate()(halves))
    return keras.Model(texts, layers.Dense(3)(both))


def encoder_decoder():
    """Both with one table of words, looked up three times, and one of positions."""
    source, target = keras.Input((6,), dtype="int32"), keras.Input((4,), dtype="int32")
    words, places = layers.Embedding(29, 12), layers.Embedding(6, 12)
    encoded = words(source) + places(keras.ops.arange(6))
    encoded = layers.Dense(12, activation="relu")(encoded)
    decoded = words(target) + places(keras.ops.arange(4)) + words(source)[:, :4]
    attended = layers.MultiHeadAttention(2, 6)(decoded, encoded)
    return keras.Model([source, target], layers.Dense(3)(layers.Flatten()(attended)))


def constant_rows():
    """Graph optimizers find that the rows of the second embedding do not depend on the batch."""
    words = keras.Input((6,), dtype="int32")
    places = 0 * words + np.arange(6)
    x = layers.Embedding(29, 8)(words) + layers.Embedding(6, 8)(places)
    x = layers.Dense(9, activation="relu")(layers.Flatten()(x))
    return keras.Model(words, layers.Dense(3)(layers.Dense(7)(x)))


def many_outputs():
    """Two outputs, a regularizer, dicts."""
    inputs = keras.Input((7,), name="left")
    x = layers.Dense(11, activation="relu", kernel_regularizer="l2")(inputs)
    x = layers.Dense(9, activation="relu")(layers.Dense(13)(x))
    class_ = layers.Dense(3, name="class_")(x)
    size = layers.Dense(1, activation="sigmoid", name="size")(x)
    return keras.Model({"left": inputs}, {"class_": class_, "size": size})


def two_inputs():
    """And a dropout."""
    a, b = keras.Input((7,)), keras.Input((6,))
    left, right = layers.Dense(11, activation="relu")(a), layers.Dense(13, activation="relu")(b)
    both = layers.Dropout(0.3, seed=5)(layers.Concatenate()([left, right]))
    return keras.Model([a, b], layers.Dense(3)(layers.Dense(10)(both)))


class DoubledByPython(keras.layers.Layer):
    """Only Python knows this tensor's shape; and the function has a gradient of its own."""

    def call(self, x):
        @tf.custom_gradient
        def doubled(x):
            out = tf.numpy_function(lambda v: 2 * v, [x], x.dtype)
            out.set_shape(x.shape)
            return out, lambda d: 2 * d

        return doubled(x)


class Custom(keras.Model):
    """A train_step of its own that returns a loss which is no metric."""

    def __init__(self):
        super().__init__()
        self.layers_ = [layers.Dense(12, activation="relu"), layers.Dense(9), layers.Dense(3)]

    def call(self, x, training=False):
        for layer in self.layers_:
            x = layer(x)
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.one_hot(y, 3)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def frozen_backbone():
    """Six layers that do not train, and a head: cut between the frozen ones."""
    frozen = [layers.Dense(193 + 16 * i, activation="relu", trainable=False) for i in range(6)]
    return keras.Sequential([keras.Input((7,)), *frozen, layers.Dense(5), layers.Dense(3)])


def long_tail():
    """Products of activations with each other between two layers: much of the step, and no weights.

    The layer behind them is a stage of its own, and its gradient serves the first layer alone.
    """
    inputs = keras.Input((7,))
    x = layers.Reshape((60, 60))(layers.Dense(3600)(inputs))
    for _ in range(6):
        x = keras.ops.softmax(keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1))) / 60) + x
    x = layers.Dense(400, activation="relu")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def batch_normalized():
    """Moving averages are weights too, and compared with the others."""
    inputs = x = keras.Input((7,))
    for width in (12, 10, 9):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(width)(x)))
    return keras.Model(inputs, layers.Dense(3)(x))


def attention():
    """A transformer layer, whose bits depend on the names of ops."""
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(19, 32)(inputs) + layers.Embedding(8, 32)(0 * inputs + np.arange(8))
    x = layers.LayerNormalization()(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
    return keras.Model(inputs, layers.Dense(3)(x[:, 0]))


def unrolled():
    one, two = layers.LSTM(6, return_sequences=True, unroll=True), layers.GRU(5, unroll=True)
    return keras.Sequential([keras.Input((4, 2)), one, two, layers.Dense(3)])


def looped():
    """Recurrent layers whose loops are not unrolled."""
    lstm, gru = layers.LSTM(6, return_sequences=True), layers.GRU(7, return_sequences=True)
    return keras.Sequential([keras.Input((4, 2)), lstm, gru, layers.SimpleRNN(5), layers.Dense(3)])


def looped_residual():
    """The result of a loop meets something of a lower layer."""
    inputs = keras.Input((4, 3))
    x = layers.Dense(6)(inputs)
    for _ in range(2):
        x = layers.Add()([x, layers.LSTM(6, return_sequences=True)(x)])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def looped_again():
    """One loop below another layer and above it."""
    lstm, inputs = layers.LSTM(6, return_sequences=True), keras.Input((4, 6))
    x = lstm(layers.Dense(6)(lstm(inputs)))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class LanguageModel(keras.Model):
    """Loops between an embedding and the same one as the output's kernel."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(29, 8)
        self.loops = [layers.LSTM(8, return_sequences=True) for _ in range(2)]

    def call(self, words):
        hidden = self.embedding(words)
        for loop in self.loops:
            hidden = loop(hidden)
        return tf.tensordot(hidden, tf.transpose(self.embedding.embeddings), 1)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * tf.reduce_mean(tf.square(x)))
        return x


def nested():
    """An inner model that is used twice, a penalty for its activations, and one for a kernel."""
    inner = keras.Sequential([keras.Input((12,)), layers.Dense(12, "tanh"), layers.Dense(12)])
    inputs = keras.Input((7,))
    x = inner(inner(layers.Dense(12, kernel_regularizer="l2")(inputs)))
    return keras.Model(inputs, layers.Dense(3)(AddsLoss()(x)))
