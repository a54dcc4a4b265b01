"""Small models of every kind that users train, for tests: name -> function that makes one.

Each function returns ``(model, x, y)``; sizes are odd and unequal on purpose.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

from tf_ooo.compat import keras_compiled, versions

# The user's ``tf.keras`` is this: Keras 3, Keras 2 on TensorFlow 2.15, tf_keras with TF_USE_LEGACY_KERAS=1.
keras = versions.user_keras()
layers = keras.layers
KERAS_3 = hasattr(keras, "ops")
OLDER_XLA = tuple(map(int, tf.__version__.split(".")[:2])) < (2, 21)
needs_xla_streams = pytest.mark.skipif(OLDER_XLA, reason="needs the XLA of TensorFlow 2.21")
needs_keras_3 = pytest.mark.skipif(not KERAS_3, reason="needs what only Keras 3 has")

CLASSES = 3
BATCH = 6


def labels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, CLASSES, BATCH)


def features(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(BATCH, *shape)).astype("float32")


def tokens(*shape: int, size: int = 11) -> np.ndarray:
    return np.random.default_rng(3).integers(0, size, (BATCH, *shape))


def stack(x: np.ndarray, *parts):
    model = keras.Sequential([keras.Input(x.shape[1:]), *parts, layers.Dense(CLASSES)])
    return model, x, labels()


def mlp():
    return stack(
        features(7),
        layers.Dense(13, activation="relu"),
        layers.Dropout(0.2, seed=5),
        layers.Dense(9, activation="gelu", use_bias=False),
        layers.Dense(6, activation="tanh"),
    )


def one_layer():
    return stack(features(7))


def convolutions():
    return stack(
        features(14, 14, 3),
        layers.Conv2D(5, 3),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(7, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
    )


def conv3d():
    return stack(
        features(5, 6, 7, 2), layers.Conv3D(4, 2, activation="relu"), layers.GlobalAveragePooling3D()
    )


def conv1d_transpose():
    return stack(features(9, 2), layers.Conv1DTranspose(5, 3, activation="relu"), layers.GlobalMaxPooling1D())


def lstm_gru():
    return stack(tokens(7), layers.Embedding(11, 8), layers.LSTM(6, return_sequences=True), layers.GRU(5))


def unrolled_rnn():
    return stack(
        tokens(4),
        layers.Embedding(11, 8),
        layers.LSTM(6, return_sequences=True, unroll=True),
        layers.GRU(5, unroll=True),
    )


def bidirectional():
    return stack(tokens(5), layers.Embedding(11, 8), layers.Bidirectional(layers.LSTM(4)))


@keras.utils.register_keras_serializable("tests")
class TiedModel(keras.Model):
    """The embedding is the output projection, too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(CLASSES, 8)
        self.hidden = layers.Dense(8, activation="relu")

    def call(self, x):
        h = self.hidden(self.embedding(x))
        return tf.reduce_mean(tf.matmul(h, self.embedding.embeddings, transpose_b=True), axis=1)


def tied():
    return TiedModel(), tokens(5, size=CLASSES), labels()


def attention():
    inputs = keras.Input((6,))
    h = layers.Embedding(11, 8)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
    h = layers.GlobalAveragePooling1D()(h)
    return keras.Model(inputs, layers.Dense(CLASSES)(h)), tokens(6), labels()


def residual():
    inputs = keras.Input((8, 8, 3))
    h = layers.Conv2D(6, 3, padding="same", use_bias=False)(inputs)
    h = layers.BatchNormalization()(h)
    for _ in range(2):
        branch = layers.Conv2D(6, 3, padding="same", use_bias=False)(layers.ReLU()(h))
        h = layers.Add()([h, layers.BatchNormalization()(branch)])
    h = layers.GlobalAveragePooling2D()(h)
    return keras.Model(inputs, layers.Dense(CLASSES)(h)), features(8, 8, 3), labels()


def frozen_layer():
    model, x, y = stack(features(7), layers.Dense(13, activation="relu"), layers.Dense(9, activation="relu"))
    model.layers[1].trainable = False
    return model, x, y


def regularized():
    return stack(
        features(7),
        layers.Dense(13, activation="relu", kernel_regularizer="l2", bias_regularizer="l1"),
        layers.Dense(9, activation="relu", activity_regularizer="l2"),
    )


class Scale(layers.Layer):
    """Multiplies by one trainable number."""

    def build(self, _):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


def scalar_weights():
    return stack(features(7), layers.Dense(13, activation="relu"), Scale(), layers.Dense(5), Scale())


SMALL = {
    f.__name__: f
    for f in (
        mlp, one_layer, convolutions, conv3d, conv1d_transpose, lstm_gru, unrolled_rnn, bidirectional,
        tied, attention, residual, frozen_layer, regularized, scalar_weights,
    )
}  # fmt: skip


def application(name: str, size: int = 32):
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=CLASSES, classifier_activation=None
    )
    return model, features(size, size, 3), labels()


APPLICATIONS = (
    "MobileNetV3Small", "MobileNetV3Large", "DenseNet121", "ResNet50", "EfficientNetV2B0",
    "ConvNeXtTiny", "VGG16",
)  # fmt: skip


def backbone(name: str):
    """A KerasHub backbone from its configuration, without weights to download."""
    import keras_hub

    sizes = {
        "vocabulary_size": 31, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 24,
        "max_sequence_length": 9,
    }  # fmt: skip
    x = {"token_ids": tokens(9, size=31), "padding_mask": np.ones((BATCH, 9), "int32")}
    if name == "BertBackbone":
        x["segment_ids"] = np.zeros((BATCH, 9), "int32")
    core = getattr(keras_hub.models, name)(**sizes)
    output = core.output["pooled_output"] if name == "BertBackbone" else core.output[:, 0]
    return keras.Model(core.input, layers.Dense(CLASSES)(output)), x, labels()


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(),
    "adamw": lambda: keras.optimizers.AdamW(weight_decay=0.01),
    "lion": lambda: keras.optimizers.Lion(),
    "muon": lambda: keras.optimizers.Muon(),
    "lamb": lambda: keras.optimizers.Lamb(),
    "adafactor": lambda: keras.optimizers.Adafactor(),
    "rmsprop": lambda: keras.optimizers.RMSprop(centered=True, momentum=0.9),
    "clip_value": lambda: keras.optimizers.Adam(clipvalue=0.1),
    "clip_norm": lambda: keras.optimizers.Adam(clipnorm=0.1),
    "global_clip_norm": lambda: keras.optimizers.Adam(global_clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.Adam(gradient_accumulation_steps=3),
    "ema": lambda: keras.optimizers.Adam(use_ema=True, ema_momentum=0.9),
    "loss_scale": lambda: loss_scaling()(keras.optimizers.Adam()),
}
KERAS_3_OPTIMIZERS = {"muon", "lamb", "accumulation"}


def optimizers(*names: str) -> list:
    """Parameters of a test: the names of optimizers, those that Keras 2 lacks skipped there."""
    marks = {name: [needs_keras_3] if name in KERAS_3_OPTIMIZERS else [] for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def loss_scaling():
    return keras.optimizers.LossScaleOptimizer if KERAS_3 else keras.mixed_precision.LossScaleOptimizer


def compiled(build, optimizer: str = "adam", **kwargs):
    """``(model, x, y)`` ready for ``fit``, the graph executor chosen unless told otherwise."""
    keras.utils.set_random_seed(7)
    model, x, y = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"loss": loss, "metrics": ["accuracy"], "jit_compile": False}
    model.compile(optimizer=OPTIMIZERS[optimizer](), **(arguments | kwargs))
    return model, x, y


def make_variables(model, x, y):
    """All of them, as ``fit`` does before its first step: otherwise that step is traced twice."""
    if not KERAS_3:
        model.train_step(tf.nest.map_structure(tf.convert_to_tensor, (x, y)))
        return
    data = x if y is None else (x, y)
    model._symbolic_build(data_batch=tf.nest.map_structure(lambda rows: rows[:1], data))


def traced_step(model, x, y):
    """The model's own train step as one ConcreteFunction, batch size unknown."""
    make_variables(model, x, y)
    keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), (x, y))
    return tf.function(lambda data: model.train_step(data)).get_concrete_function(spec)
