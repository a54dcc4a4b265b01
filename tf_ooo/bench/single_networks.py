"""The networks of ``tf-ooo bench single``: name -> (Keras model, a batch of random data)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CLASSES = 100


def densenet(blocks: tuple[int, ...], growth: int, size: int) -> Any:
    """DenseNet-BC (arXiv 1608.06993) with any growth rate; Keras' own has 32 only."""
    from keras import Input, Model, layers

    def convolution(x: Any, filters: int, kernel: int) -> Any:
        x = layers.ReLU()(layers.BatchNormalization(epsilon=1.001e-5)(x))
        return layers.Conv2D(filters, kernel, padding="same", use_bias=False)(x)

    inputs = Input((size, size, 3))
    stem = size >= 128  # images of ImageNet's size begin with a stride of 4
    x = layers.Conv2D(2 * growth, 7 if stem else 3, 2 if stem else 1, padding="same", use_bias=False)(inputs)
    if stem:
        x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(layers.BatchNormalization()(x)))
    for number, count in enumerate(blocks):
        for _ in range(count):
            x = layers.Concatenate()([x, convolution(convolution(x, 4 * growth, 1), growth, 3)])
        if number < len(blocks) - 1:
            x = layers.AveragePooling2D(2)(convolution(x, x.shape[-1] // 2, 1))
    x = layers.ReLU()(layers.BatchNormalization(epsilon=1.001e-5)(x))
    return Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def application(name: str, size: int, **options: Any) -> Any:
    """One of ``keras.applications``, without weights."""
    import keras

    made = getattr(keras.applications, name)
    return made(
        weights=None, input_shape=(size, size, 3), classes=CLASSES, classifier_activation=None, **options
    )


def encoder(depth: int, width: int, length: int) -> Any:
    """A BERT-like encoder over vectors."""
    from keras import Input, Model, layers

    inputs = Input((length, width))
    x = inputs
    for _ in range(depth):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(width // 64 or 1, 64)(x, x))
        x = layers.LayerNormalization()(
            x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        )
    return Model(inputs, layers.Dense(CLASSES)(x[:, 0]))


def rnn(depth: int, width: int, length: int) -> Any:
    """LSTM layers, unrolled: a loop's dW cannot leave the loop."""
    from keras import Input, Sequential, layers

    body = [layers.LSTM(width, return_sequences=n < depth - 1, unroll=True) for n in range(depth)]
    return Sequential([Input((length, width)), *body, layers.Dense(CLASSES)])


DENSENET_121, DENSENET_169 = (6, 12, 24, 16), (6, 12, 32, 32)
NETWORKS: dict[str, Callable[[], Any]] = {
    **{f"densenet121-k{k}": lambda k=k: densenet(DENSENET_121, k, 32) for k in (12, 24, 32)},  # type: ignore[misc]
    "densenet169-k32": lambda: densenet(DENSENET_169, 32, 32),
    **{
        f"mobilenetv3l-a{alpha}": lambda a=alpha: application("MobileNetV3Large", 224, alpha=a)  # type: ignore[misc]
        for alpha in (0.25, 0.5, 0.75, 1.0)
    },
    "resnet50": lambda: application("ResNet50", 224),
    "resnet101": lambda: application("ResNet101", 224),
    "encoder-6x512": lambda: encoder(6, 512, 128),
    "lstm-2x512": lambda: rnn(2, 512, 16),
    # Small ones: a check of the machinery where there is no GPU.
    "densenet-small": lambda: densenet((2, 2), 8, 16),
    "encoder-small": lambda: encoder(1, 64, 16),
    "lstm-small": lambda: rnn(1, 32, 4),
}
SMALL = tuple(name for name in NETWORKS if name.endswith("-small"))
BATCHES = (16, 32, 64, 128, 256)


def batch(model: Any, count: int) -> tuple[Any, Any]:
    """Random inputs and labels as constants on the device."""
    import tensorflow as tf

    tf.random.set_seed(1)
    x = tf.random.normal((count, *model.input_shape[1:]))
    return x, tf.random.uniform((count,), 0, CLASSES, tf.int32)
