"""Networks at sizes that two CPU cores can train: the shapes of the known ones, narrower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Network:
    """A model and the random data it trains on.

    Attributes:
        build: makes the model; logits come out.
        batch: rows.
        shape: of one row.
        tokens: rows hold whole numbers below this; None: normal floats.
        classes: of the labels, of which each row has one.
    """

    build: Callable[[], keras.Model]
    batch: int
    shape: tuple[int, ...]
    tokens: int | None = None
    classes: int = 10

    def data(self, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Random rows and labels."""
        random = np.random.default_rng(seed)
        size = (rows, *self.shape)
        if self.tokens is None:
            x = random.normal(size=size).astype("float32")
        else:
            x = random.integers(0, self.tokens, size).astype("int32")
        return x, random.integers(0, self.classes, rows)


def mlp(widths: Sequence[int]) -> keras.Model:
    """Dense layers; the first of the widths is that of the inputs, the last the number of classes."""
    import keras

    hidden = [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    return keras.Sequential([keras.Input((widths[0],)), *hidden, keras.layers.Dense(widths[-1])])


def equal_mlp(layers: int, width: int) -> keras.Model:
    """Dense layers of one width."""
    return mlp([width] * (layers + 1) + [10])


def vgg16(width: float, dense: int, pixels: int) -> keras.Model:
    """VGG-16 (Simonyan and Zisserman 2015, configuration D) with ``width`` times its channels."""
    import keras

    layers: list[keras.Layer] = [keras.Input((pixels, pixels, 3))]
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        layers += [
            keras.layers.Conv2D(round(channels * width), 3, padding="same", activation="relu")
            for _ in range(count)
        ]
        layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.Flatten(), *(keras.layers.Dense(dense, activation="relu") for _ in range(2))]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def resnet(blocks: tuple[int, ...], width: float, pixels: int) -> keras.Model:
    """ResNet of bottleneck blocks (He et al. 2016) with ``width`` times the channels of the known ones."""
    import keras

    inputs = keras.Input((pixels, pixels, 3))
    x = _conv(inputs, round(64 * width), 3)
    for stage, count in enumerate(blocks):
        channels = round(64 * width) * 2**stage
        for number in range(count):
            x = _bottleneck(x, channels, 2 if number == 0 and stage else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


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


def encoder(layers: int, width: int, heads: int, length: int, vocabulary: int, classes: int = 10) -> keras.Model:
    """BERT's encoder (Devlin et al. 2019): post-norm blocks, learned positions, pooled first token."""
    import keras

    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(inputs)
    # Of the inputs: an embedding of a constant would be computed at once, and be no part of the model.
    x = x + keras.layers.Embedding(length, width)(0 * inputs + np.arange(length, dtype="int32"))
    x = keras.layers.LayerNormalization()(x)
    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        inner = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(inner))
    return keras.Model(inputs, keras.layers.Dense(classes)(x[:, 0]))


NETWORKS = {
    "mlp": Network(lambda: equal_mlp(8, 1024), 256, (1024,)),
    "mlp_small": Network(lambda: equal_mlp(8, 512), 256, (512,)),
    "mlp_large_batch": Network(lambda: equal_mlp(8, 512), 768, (512,)),
    "mlp_deep": Network(lambda: equal_mlp(16, 512), 768, (512,)),
    "vgg16": Network(lambda: vgg16(0.5, 2048, 32), 32, (32, 32, 3)),
    "resnet50": Network(lambda: resnet((3, 4, 6, 3), 0.5, 32), 32, (32, 32, 3)),
    "resnet101": Network(lambda: resnet((3, 4, 23, 3), 0.5, 32), 16, (32, 32, 3)),
    "bert": Network(lambda: encoder(6, 256, 4, 64, 4000), 8, (64,), tokens=4000),
}
