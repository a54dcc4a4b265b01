"""The networks of ``tf-ooo bench single``, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_ooo.bench.shared import networks

if TYPE_CHECKING:
    import keras

CLASSES = 100


def densenet(
    blocks: tuple[int, ...], growth: int, size: int, classes: int = CLASSES, rows: int | None = None
) -> keras.Model:
    """DenseNet-BC (arXiv 1608.06993) with any growth rate; Keras' own has 32 only."""
    from keras import Input, Model, layers

    def convolution(x: keras.KerasTensor, filters: int, kernel: int) -> keras.KerasTensor:
        x = layers.ReLU()(layers.BatchNormalization(epsilon=1.001e-5)(x))
        return layers.Conv2D(filters, kernel, padding="same", use_bias=False)(x)

    inputs = Input((size, size, 3), batch_size=rows)
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
    return Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def application(name: str, size: int, **options: float) -> keras.Model:
    """One of ``keras.applications``, without weights."""
    import keras

    return getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=CLASSES, classifier_activation=None, **options
    )


def encoder(depth: int, width: int, length: int) -> keras.Model:
    """A BERT-like encoder over vectors, with heads of 64."""
    return networks.encoder(depth, width, width // 64, length, None, CLASSES)


def rnn(depth: int, width: int, length: int) -> keras.Model:
    """LSTM layers."""
    return networks.rnn("LSTM", depth, width, length, CLASSES)


KINDS: dict[str, Callable[..., Any]] = {
    "densenet": densenet,
    "application": application,
    "encoder": encoder,
    "rnn": rnn,
}
_121, _169 = (6, 12, 24, 16), (6, 12, 32, 32)
# name -> (kind, arguments): PyTorch's counterparts read them, too.
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"densenet121-k{k}": ("densenet", {"blocks": _121, "growth": k, "size": 32}) for k in (12, 24, 32)},
    "densenet169-k32": ("densenet", {"blocks": _169, "growth": 32, "size": 32}),
    **{
        f"mobilenetv3l-a{alpha}": ("application", {"name": "MobileNetV3Large", "size": 224, "alpha": alpha})
        for alpha in (0.25, 0.5, 0.75, 1.0)
    },
    "resnet50": ("application", {"name": "ResNet50", "size": 224}),
    "resnet101": ("application", {"name": "ResNet101", "size": 224}),
    "encoder-6x512": ("encoder", {"depth": 6, "width": 512, "length": 128}),
    "lstm-2x512": ("rnn", {"depth": 2, "width": 512, "length": 16}),
    # Small ones: a check of the machinery where there is no GPU.
    "densenet-small": ("densenet", {"blocks": (2, 2), "growth": 8, "size": 16}),
    "encoder-small": ("encoder", {"depth": 1, "width": 64, "length": 16}),
    "lstm-small": ("rnn", {"depth": 1, "width": 32, "length": 4}),
}
NETWORKS = tuple(SPECS)
SMALL = tuple(name for name in NETWORKS if name.endswith("-small"))
BATCHES = (16, 32, 64, 128, 256)


def spec_of(name: str, size: int | None = None) -> tuple[str, dict[str, Any]]:
    """(kind, arguments); ``size``: images of another one, where the network takes images."""
    kind, arguments = SPECS[name]
    return kind, arguments if size is None or "size" not in arguments else {**arguments, "size": size}


def build(name: str, size: int | None = None) -> keras.Model:
    """The Keras model."""
    kind, arguments = spec_of(name, size)
    return KINDS[kind](**arguments)
