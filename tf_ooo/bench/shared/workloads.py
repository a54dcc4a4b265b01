"""Models and batches of the pipeline benchmark: deep enough to be cut, narrow enough for a share of a core.

All are made by :func:`make`; the same seed gives the same weights and data.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras
    import numpy as np

SEED = 1
CLASSES = 16
VOCABULARY = 512
# Layers before the output's, and their width.
FEED_FORWARD = (16, 1280)


@dataclass(frozen=True)
class Workload:
    """A compiled model and one batch of made-up data for it."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray


def compiled(model: keras.Model, x: np.ndarray, y: np.ndarray) -> Workload:
    """The model, ready to be trained on this batch: logits come out of it."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
    return Workload(model, x, y)


def _functional(inputs: keras.KerasTensor, outputs: keras.KerasTensor, x: np.ndarray, y: np.ndarray) -> Workload:
    import keras

    return compiled(keras.Model(inputs, outputs), x, y)


def _tokens(rows: int, length: int) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(SEED).integers(0, VOCABULARY, (rows, length)).astype("int32")


def labels(*shape: int) -> np.ndarray:
    """Made-up labels, int32 below :data:`CLASSES`."""
    import numpy as np

    return np.random.default_rng(SEED + 1).integers(0, CLASSES, shape).astype("int32")


def _embedded(tokens: keras.KerasTensor, length: int, width: int) -> keras.KerasTensor:
    import keras

    # Of the tokens: an embedding of a constant would be computed at once, and be no part of the model.
    places = keras.ops.arange(length) + 0 * tokens
    return keras.layers.Embedding(VOCABULARY, width)(tokens) + keras.layers.Embedding(length, width)(places)


def _block(x: keras.KerasTensor, width: int, causal: bool) -> keras.KerasTensor:
    """A transformer layer; norms first if causal, as in GPT-2, last if not, as in BERT."""
    import keras

    layers = keras.layers
    attention = layers.MultiHeadAttention(4, width // 4)
    if causal:
        y = layers.LayerNormalization()(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        return x + layers.Dense(width)(y)
    x = layers.LayerNormalization()(x + attention(x, x))
    y = layers.Dense(4 * width, activation="gelu")(x)
    return layers.LayerNormalization()(x + layers.Dense(width)(y))


def _bert(depth: int, width: int, length: int, rows: int) -> Workload:
    import keras

    tokens = keras.Input((length,), dtype="int32", batch_size=rows)
    x = keras.layers.LayerNormalization()(_embedded(tokens, length, width))
    for _ in range(depth):
        x = _block(x, width, causal=False)
    pooled = keras.layers.Dense(width, activation="tanh")(x[:, 0])
    return _functional(tokens, keras.layers.Dense(CLASSES)(pooled), _tokens(rows, length), labels(rows))


def _gpt2(depth: int, width: int, length: int, rows: int) -> Workload:
    import keras

    tokens = keras.Input((length,), dtype="int32", batch_size=rows)
    x = _embedded(tokens, length, width)
    for _ in range(depth):
        x = _block(x, width, causal=True)
    logits = keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x))
    data = _tokens(rows, length + 1)
    return _functional(tokens, logits, data[:, :-1], data[:, 1:])


def _feed_forward(depth: int, width: int, rows: int) -> Workload:
    import keras

    inputs = keras.Input((width,), batch_size=rows)
    x = inputs
    for _ in range(depth):
        x = keras.layers.Dense(width, activation="relu")(x)
    return _functional(inputs, keras.layers.Dense(CLASSES)(x), numbers(rows, width), labels(rows))


def numbers(*shape: int) -> np.ndarray:
    """Made-up inputs, float32."""
    import numpy as np

    return np.random.default_rng(SEED).normal(size=shape).astype("float32")


def _rnn(depth: int, width: int, length: int, rows: int) -> Workload:
    """Unrolled, so that sizes are known and a layer's steps are ops of the graph."""
    import keras

    inputs = keras.Input((length, width), batch_size=rows)
    x = inputs
    for number in range(depth):
        last = number == depth - 1
        x = keras.layers.SimpleRNN(width, return_sequences=not last, unroll=True)(x)
    return _functional(inputs, keras.layers.Dense(CLASSES)(x), numbers(rows, length, width), labels(rows))


def _resnet(blocks: int, width: int, size: int, rows: int) -> Workload:
    """Residual blocks of two convolutions; three stages, each at half the size and twice the width."""
    import keras

    inputs = keras.Input((size, size, 3), batch_size=rows)
    x = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(inputs)
    for number in range(3 * blocks):
        stride = 2 if number in (blocks, 2 * blocks) else 1
        x = residual(x, width * 2 ** (number // blocks), stride)
    outputs = keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    return _functional(inputs, outputs, numbers(rows, size, size, 3), labels(rows))


def residual(x: keras.KerasTensor, width: int, stride: int) -> keras.KerasTensor:
    """A residual block of two convolutions."""
    import keras

    layers = keras.layers
    y = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(y))
    if stride != 1 or x.shape[-1] != width:
        x = layers.Conv2D(width, 1, strides=stride, use_bias=False)(x)
    return layers.ReLU()(x + y)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "bert12": lambda rows: _bert(12, 256, 64, rows),
    "bert24": lambda rows: _bert(24, 256, 64, rows),
    "gpt2": lambda rows: _gpt2(12, 256, 64, rows),
    "feed_forward": lambda rows: _feed_forward(*FEED_FORWARD, rows),
    "rnn16": lambda rows: _rnn(16, 512, 8, rows),
    "resnet": lambda rows: _resnet(4, 32, 32, rows),
}
# Rows of one micro-batch.  A task must take many periods of the CPU quota: a device that has waited runs at
# full speed until its quota of that period is used up, and up to a tick of the clock (4 ms) longer, so that
# tasks of 40 ms take a sixth less than they should.  Of a message of 1 MiB its ends compute 1 to 2 ms less.
# Adding a gradient up takes as long for few rows as for many: 5% of a step for 256 rows of 1024 numbers.
ROWS = {"bert12": 6, "bert24": 6, "gpt2": 12, "feed_forward": 768, "rnn16": 192, "resnet": 24}


def make(name: str, microbatches: int) -> Workload:
    """The workload of that name, with a batch of so many micro-batches."""
    import keras

    keras.utils.set_random_seed(SEED)
    # Layers get the same names again: what was found in one trace holds for the next.
    keras.backend.clear_session()
    return WORKLOADS[name](ROWS[name] * microbatches)


def check_sum(model: keras.Model) -> int:
    """Of the bits of its trainable weights."""
    bits = 0
    for variable in model.trainable_variables:
        bits = zlib.crc32(variable.numpy().tobytes(), bits)
    return bits
