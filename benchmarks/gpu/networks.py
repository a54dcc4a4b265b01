"""Networks of small kernels, at the sizes of the paper's figures for one GPU, and small ones to try it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

CLASSES = 100


def densenet(blocks: Sequence[int], growth: int, pixels: int, rows: int) -> keras.Model:
    """Build DenseNet-BC (Huang et al. 2017) with any growth rate; that of Keras has 32 only."""
    from keras import Input, Model, layers

    def convolution(x: keras.KerasTensor, filters: int, kernel: int) -> keras.KerasTensor:
        x = layers.ReLU()(layers.BatchNormalization(epsilon=1.001e-5)(x))
        return layers.Conv2D(filters, kernel, padding="same", use_bias=False)(x)

    inputs = Input((pixels, pixels, 3), batch_size=rows)
    x = layers.Conv2D(2 * growth, 3, padding="same", use_bias=False)(inputs)
    for number, count in enumerate(blocks):
        for _ in range(count):
            x = layers.Concatenate()([x, convolution(convolution(x, 4 * growth, 1), growth, 3)])
        if number < len(blocks) - 1:
            x = layers.AveragePooling2D(2)(convolution(x, x.shape[-1] // 2, 1))
    x = layers.ReLU()(layers.BatchNormalization(epsilon=1.001e-5)(x))
    return Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def application(name: str, rows: int, **options: float) -> keras.Model:
    """Build a network of keras.applications for images of 224 x 224, with random weights."""
    import keras

    build: Callable[..., keras.Model] = getattr(keras.applications, name)
    return build(weights=None, classes=CLASSES, classifier_activation=None, **options)


def lstm(depth: int, width: int, length: int, rows: int) -> keras.Model:
    """Build LSTM layers, unrolled: dW cannot leave a loop."""
    import keras

    body = [keras.layers.LSTM(width, return_sequences=n < depth - 1, unroll=True) for n in range(depth)]
    inputs = keras.Input((length, width), batch_size=rows)
    return keras.Sequential([inputs, *body, keras.layers.Dense(CLASSES)])


NETWORKS: dict[str, Callable[..., keras.Model]] = {
    "densenet121-k12": partial(densenet, (6, 12, 24, 16), 12, 32),
    "mobilenetv3l-a0.5": partial(application, "MobileNetV3Large", alpha=0.5),
    "resnet50": partial(application, "ResNet50"),
    "lstm-2x512": partial(lstm, 2, 512, 16),
    "densenet-small": partial(densenet, (2, 2), 8, 16),
    "lstm-small": partial(lstm, 1, 32, 4),
}
