"""Models and optimizers made of tensorflow-addons' own parts: name -> function, as in ``tests/zoo.py``."""

from __future__ import annotations

import os

os.environ.setdefault("TF_ADDONS_PY_OPS", "1")  # no CUDA ops on a CPU

import tensorflow as tf
import tensorflow_addons as tfa

from tests.zoo import CLASSES, features, keras, labels, layers, stack, tokens


def weight_normalization():
    return stack(
        features(9, 9, 2),
        tfa.layers.WeightNormalization(layers.Conv2D(5, 3, activation="relu"), data_init=False),
        layers.Flatten(),
        tfa.layers.WeightNormalization(layers.Dense(7, activation="tanh"), data_init=False),
    )


def weight_normalization_by_data():
    """The default: the first batch sets scale and bias."""
    return stack(
        features(9, 9, 2),
        tfa.layers.WeightNormalization(layers.Conv2D(5, 3, activation="relu")),
        layers.Flatten(),
        tfa.layers.WeightNormalization(layers.Dense(7)),
    )


def spectral_normalization():
    """The kernel is normalized, and written, in the forward pass."""
    return stack(
        features(9, 9, 3),
        tfa.layers.SpectralNormalization(layers.Conv2D(5, 3, activation="relu"), power_iterations=2),
        layers.Flatten(),
        tfa.layers.SpectralNormalization(layers.Dense(7)),
    )


def layer_norm_lstm():
    return stack(
        tokens(5),
        layers.Embedding(11, 8),
        layers.RNN(tfa.rnn.LayerNormLSTMCell(6), return_sequences=True),
        layers.RNN([tfa.rnn.LayerNormLSTMCell(5), layers.GRUCell(4)]),
    )


def maxout_and_norms():
    return stack(
        features(8),
        layers.Dense(12, activation=tfa.activations.mish),
        tfa.layers.GroupNormalization(groups=3),
        tfa.layers.Maxout(4),
        layers.Dense(6, activation=tfa.activations.gelu),
    )


class AttentionDecoder(keras.Model):
    """An encoder, and a decoder with Luong's attention over what it made, fed with the true tokens."""

    def __init__(self):
        super().__init__()
        self.source, self.target = layers.Embedding(11, 8), layers.Embedding(CLASSES, 7)
        self.encoder = layers.LSTM(6, return_sequences=True, return_state=True)
        self.attention = tfa.seq2seq.LuongAttention(6)
        self.cell = tfa.seq2seq.AttentionWrapper(layers.LSTMCell(6), self.attention, attention_layer_size=5)
        self.decoder = tfa.seq2seq.BasicDecoder(
            self.cell, tfa.seq2seq.TrainingSampler(), output_layer=layers.Dense(CLASSES)
        )

    def call(self, inputs):
        source, target = inputs
        memory, h, c = self.encoder(self.source(source))
        self.attention.setup_memory(memory)
        count = tf.shape(source)[0]
        state = self.cell.get_initial_state(batch_size=count, dtype=tf.float32).clone(cell_state=[h, c])
        lengths = tf.fill([count], tf.shape(target)[1])
        outputs, _, _ = self.decoder(self.target(target), initial_state=state, sequence_length=lengths)
        return outputs.rnn_output


def attention_decoder():
    target = tokens(5, size=CLASSES)
    return AttentionDecoder(), (tokens(7), target), target


def one_hot_mlp():
    """For losses that want one number per class."""
    model, x, _ = stack(features(7), layers.Dense(13, activation="relu"), layers.Dense(6, activation="tanh"))
    return model, x, tf.one_hot(labels(), CLASSES).numpy()


def mlp():
    return stack(
        features(7), layers.Dense(13, activation="relu"), layers.Dense(9, use_bias=False, activation="tanh")
    )


def embedded():
    """Gradients of rows, which LazyAdam alone updates."""
    return stack(tokens(6), layers.Embedding(11, 8), layers.Flatten(), layers.Dense(9, activation="relu"))


MODELS = {
    f.__name__: f
    for f in (
        weight_normalization,
        weight_normalization_by_data,
        spectral_normalization,
        layer_norm_lstm,
        maxout_and_norms,
        attention_decoder,
    )
}

OPTIMIZERS = {
    "lamb": lambda: tfa.optimizers.LAMB(0.01, weight_decay=0.01),
    "lazy_adam": lambda: tfa.optimizers.LazyAdam(0.01),
    "moving_average": lambda: tfa.optimizers.MovingAverage(tfa.optimizers.AdamW(0.01, 0.01), 0.9),
    "swa": lambda: tfa.optimizers.SWA("sgd", start_averaging=2, average_period=2),
    "lookahead": lambda: tfa.optimizers.Lookahead(tfa.optimizers.RectifiedAdam(0.01), sync_period=3),
    "novograd": lambda: tfa.optimizers.NovoGrad(0.01),
}
