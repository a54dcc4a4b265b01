"""Networks of a few different layers, of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def convolutions(channels: Sequence[int], pixels: int, dense: int, rows: int | None = None) -> keras.Model:
    """3 x 3 convolutions, every second one followed by pooling, and two dense layers."""
    import keras

    layers: list[keras.Layer] = [keras.Input((pixels, pixels, 3), batch_size=rows)]
    for number, count in enumerate(channels):
        layers.append(keras.layers.Conv2D(count, 3, padding="same", activation="relu"))
        if number % 2:
            layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.Flatten(), keras.layers.Dense(dense, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def unet(width: int, depth: int, pixels: int, classes: int, rows: int | None = None) -> keras.Model:
    """U-Net (Ronneberger et al. 2015) with one convolution where that has two; logits of each pixel."""
    import keras

    def convolved(x: keras.KerasTensor, channels: int) -> keras.KerasTensor:
        return keras.layers.Conv2D(channels, 3, padding="same", activation="relu")(x)

    x = inputs = keras.Input((pixels, pixels, 3), batch_size=rows)
    skipped = []
    for level in range(depth):
        x = convolved(x, width * 2**level)
        skipped.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = convolved(x, width * 2**depth)
    for level in reversed(range(depth)):
        x = keras.layers.Concatenate()([keras.layers.UpSampling2D()(x), skipped[level]])
        x = convolved(x, width * 2**level)
    return keras.Model(inputs, keras.layers.Conv2D(classes, 1)(x))


def text(vocabulary: int, width: int, length: int, rows: int | None = None) -> keras.Model:
    """Embedded tokens, two convolutions of different widths over them, their maxima, two dense layers."""
    import keras

    tokens = keras.Input((length,), dtype="int32", batch_size=rows)
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    x = keras.layers.Conv1D(3 * width, 5, padding="same", activation="relu")(x)
    x = keras.layers.Conv1D(2 * width, 3, padding="same", activation="relu")(x)
    x = keras.layers.Dense(5 * width, activation="relu")(keras.layers.GlobalMaxPooling1D()(x))
    return keras.Model(tokens, keras.layers.Dense(10)(x))
