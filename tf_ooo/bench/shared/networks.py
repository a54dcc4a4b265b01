"""The networks of the benchmarks: the shapes of the known ones, at sizes that two CPU cores can train.

``rows`` is the size of a batch where the graph is to know it; None: any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Network:
    """A model, whose outputs are logits, and the random data it trains on.

    Of one row ``shape`` and ``labels`` are the shapes of input and labels; inputs are whole numbers below
    ``tokens``, None: normal floats.
    """

    build: Callable[..., keras.Model]  # with rows= for a batch of one size
    batch: int
    shape: tuple[int, ...]
    tokens: int | None = None
    classes: int = 10
    labels: tuple[int, ...] = ()

    def data(self, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Random rows and labels."""
        random = np.random.default_rng(seed)
        size = (rows, *self.shape)
        if self.tokens is None:
            x = random.normal(size=size).astype("float32")
        else:
            x = random.integers(0, self.tokens, size).astype("int32")
        return x, random.integers(0, self.classes, (rows, *self.labels))


def mlp(widths: Sequence[int], rows: int | None = None) -> keras.Model:
    """Dense layers; the first of the widths is that of the inputs, the last the number of classes."""
    import keras

    hidden = [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    inputs = keras.Input((widths[0],), batch_size=rows)
    return keras.Sequential([inputs, *hidden, keras.layers.Dense(widths[-1])])


def vgg16(width: float, dense: int, pixels: int, rows: int | None = None) -> keras.Model:
    """VGG-16 (Simonyan and Zisserman 2015, configuration D) with ``width`` times its channels."""
    import keras

    layers: list[keras.Layer] = [keras.Input((pixels, pixels, 3), batch_size=rows)]
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        layers += [
            keras.layers.Conv2D(round(channels * width), 3, padding="same", activation="relu")
            for _ in range(count)
        ]
        layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.Flatten(), *(keras.layers.Dense(dense, activation="relu") for _ in range(2))]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def resnet(
    blocks: tuple[int, ...], width: float, pixels: int, rows: int | None = None, classes: int = 10
) -> keras.Model:
    """ResNet of bottleneck blocks (He et al. 2016) with ``width`` times the channels of the known ones."""
    import keras

    inputs = keras.Input((pixels, pixels, 3), batch_size=rows)
    x = _conv(inputs, round(64 * width), 3)
    for stage, count in enumerate(blocks):
        channels = round(64 * width) * 2**stage
        for number in range(count):
            x = _bottleneck(x, channels, 2 if number == 0 and stage else 1)
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(x)))


def plain_resnet(blocks: tuple[int, ...], width: int, classes: int, rows: int | None = None) -> keras.Model:
    """ResNet of blocks of two convolutions for 32 x 32 images; ``width``: channels of the first blocks."""
    import keras

    inputs = keras.Input((32, 32, 3), batch_size=rows)
    x = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(inputs)
    for stage, count in enumerate(blocks):
        for number in range(count):
            x = _two_convolutions(x, width * 2**stage, 2 if number == 0 and stage else 1)
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(x)))


def _conv(
    x: keras.KerasTensor, channels: int, kernel: int, strides: int = 1, active: bool = True
) -> keras.KerasTensor:
    import keras

    x = keras.layers.Conv2D(channels, kernel, strides, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.layers.ReLU()(x) if active else x


def _bottleneck(x: keras.KerasTensor, channels: int, strides: int) -> keras.KerasTensor:
    import keras

    short = x
    if strides != 1 or x.shape[-1] != 4 * channels:
        short = _conv(x, 4 * channels, 1, strides, active=False)
    x = _conv(_conv(x, channels, 1), channels, 3, strides)
    return keras.layers.ReLU()(_conv(x, 4 * channels, 1, active=False) + short)


def _two_convolutions(x: keras.KerasTensor, channels: int, strides: int) -> keras.KerasTensor:
    import keras

    y = _conv(_conv(x, channels, 3, strides), channels, 3, active=False)
    if strides != 1 or x.shape[-1] != channels:
        x = keras.layers.Conv2D(channels, 1, strides, use_bias=False)(x)
    return keras.layers.ReLU()(x + y)


def encoder(
    layers: int, width: int, heads: int, length: int, vocabulary: int | None, classes: int = 10,
    pooled: bool = False, rows: int | None = None,
) -> keras.Model:  # fmt: skip
    """BERT's encoder (Devlin et al. 2019): post-norm blocks, logits of the first token.

    Tokens of a ``vocabulary`` are embedded with learned positions; None: inputs are vectors.  ``pooled``: a
    Dense layer of the first token comes before the logits, as in BERT.
    """
    import keras

    if vocabulary is None:
        x = inputs = keras.Input((length, width), batch_size=rows)
    else:
        inputs = keras.Input((length,), dtype="int32", batch_size=rows)
        x = keras.layers.LayerNormalization()(embedded(inputs, vocabulary, width))
    x = encoded(x, layers, width, heads)[:, 0]
    if pooled:
        x = keras.layers.Dense(width, activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x))


def encoded(x: keras.KerasTensor, layers: int, width: int, heads: int) -> keras.KerasTensor:
    """What so many post-norm blocks make of vectors of ``width`` numbers."""
    import keras

    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        inner = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(inner))
    return x


def gpt2(
    layers: int, width: int, heads: int, length: int, vocabulary: int, rows: int | None = None
) -> keras.Model:
    """GPT-2 (Radford et al. 2019): pre-norm causal blocks, logits of each next token."""
    import keras

    tokens = keras.Input((length,), dtype="int32", batch_size=rows)
    x = embedded(tokens, vocabulary, width)
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(heads, width // heads)
        y = keras.layers.LayerNormalization()(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(y)
    return keras.Model(tokens, keras.layers.Dense(vocabulary)(keras.layers.LayerNormalization()(x)))


def embedded(tokens: keras.KerasTensor, vocabulary: int, width: int) -> keras.KerasTensor:
    """Tokens (rows, length) as vectors: what each word and each place has learned, added."""
    import keras

    length = tokens.shape[1]
    # Of the tokens: an embedding of a constant would be computed at once, and be no part of the model.
    places = 0 * tokens + np.arange(length, dtype="int32")
    return keras.layers.Embedding(vocabulary, width)(tokens) + keras.layers.Embedding(length, width)(places)


def rnn(
    cell: Literal["SimpleRNN", "LSTM"], depth: int, width: int, length: int, classes: int,
    rows: int | None = None,
) -> keras.Model:  # fmt: skip
    """Unrolled, so that sizes are known and a layer's steps are ops of the graph: dW cannot leave a loop."""
    import keras

    layer = getattr(keras.layers, cell)
    body = [layer(width, return_sequences=n < depth - 1, unroll=True) for n in range(depth)]
    inputs = keras.Input((length, width), batch_size=rows)
    return keras.Sequential([inputs, *body, keras.layers.Dense(classes)])
