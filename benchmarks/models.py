"""Networks with the shapes of known ones, at sizes that two CPU cores can train, and random data for them.

A function that builds one takes ``rows``, the size of a batch where the graph is to know it; None: any.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import keras

    from benchmarks.paper.scripts import ScriptNetwork

SEED = 1


@dataclass(frozen=True)
class Network:
    """A model, whose outputs are logits, and the random data it trains on.

    Attributes:
        build: takes ``rows=``.
        batch: rows of one micro-batch, or of each worker.
        shape, labels: shapes of one row of the input and of the labels.
        tokens: inputs are whole numbers below it; None: normal floats.
    """

    build: Callable[..., keras.Model]
    batch: int
    shape: tuple[int, ...]
    tokens: int | None = None
    classes: int = 10
    labels: tuple[int, ...] = ()

    def data(self, rows: int, seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
        """Return random rows and labels."""
        random, size = np.random.default_rng(seed), (rows, *self.shape)
        if self.tokens is None:
            x = random.normal(size=size).astype("float32")
        else:
            x = random.integers(0, self.tokens, size).astype("int32")
        return x, random.integers(0, self.classes, (rows, *self.labels))

    def optimizer(self, momentum: float = 0.0) -> keras.Optimizer:
        """Return SGD at rate 0.01."""
        import keras

        return keras.optimizers.SGD(0.01, momentum)


def network_of(parameters: Mapping[str, Any], table: Mapping[str, Network]) -> Network | ScriptNetwork:
    """Return the network that a case names in a table, or that of its ``script`` of examples/paper."""
    if "script" in parameters:
        from benchmarks.paper.scripts import ScriptNetwork

        return ScriptNetwork(**parameters["script"])
    return table[parameters["model"]]


class Workload(NamedTuple):
    """A compiled model and one batch of data for it."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray


def make(
    network: Network | ScriptNetwork, microbatches: int = 1, optimizer: keras.Optimizer | None = None
) -> Workload:
    """Make the same weights and data every time, with a batch of so many times the network's rows.

    Args:
        optimizer: default is the network's own.
    """
    import keras

    keras.utils.set_random_seed(SEED)
    # Layers get the same names again: what was found in one trace holds for the next.
    keras.backend.clear_session()
    rows = network.batch * microbatches
    model = network.build(rows=rows)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or network.optimizer(), loss, jit_compile=False)
    return Workload(model, *network.data(rows))


def check_sum(model: keras.Model) -> int:
    """Return a check sum of the bits of all trainable weights."""
    bits = 0
    for variable in model.trainable_variables:
        bits = zlib.crc32(variable.numpy().tobytes(), bits)
    return bits


def weights_of(model: keras.Model) -> list[np.ndarray]:
    """Return all trainable weights."""
    return [variable.numpy() for variable in model.trainable_variables]


def largest_difference(weights: Sequence[np.ndarray], stock: Sequence[np.ndarray]) -> float:
    """Return the largest difference of a weight from stock's, as a part of the largest weight of all.

    Tensors are not taken one by one: the bias of attention's keys has no gradient but noise, so all of it
    differs.
    """
    apart = max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(weights, stock, strict=True))
    return apart / max(float(np.abs(theirs).max()) for theirs in stock)


def mlp(widths: Sequence[int], rows: int | None = None) -> keras.Model:
    """Build dense layers; the first width is that of the inputs, the last the number of classes."""
    import keras

    hidden = [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    inputs = keras.Input((widths[0],), batch_size=rows)
    return keras.Sequential([inputs, *hidden, keras.layers.Dense(widths[-1])])


def convolutions(
    blocks: Sequence[Sequence[int]], dense: Sequence[int], rows: int | None = None
) -> keras.Model:
    """Build 3 x 3 convolutions with so many channels, pooling after each block, and dense layers."""
    import keras

    layers: list[keras.Layer] = [keras.Input(_IMAGES, batch_size=rows)]
    for block in blocks:
        layers += [keras.layers.Conv2D(count, 3, padding="same", activation="relu") for count in block]
        layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.Flatten(), *(keras.layers.Dense(width, activation="relu") for width in dense)]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def resnet(
    blocks: Sequence[int], width: int, classes: int = 10, bottleneck: bool = True, rows: int | None = None
) -> keras.Model:
    """Build a ResNet (He et al. 2016) with so many blocks a stage.

    Args:
        width: channels of the first stage.
        bottleneck: blocks have three convolutions, the last one to four times the channels; else two.
    """
    import keras

    inputs = keras.Input(_IMAGES, batch_size=rows)
    x = _conv(inputs, width, 3)
    for stage, count in enumerate(blocks):
        for number in range(count):
            x = _residual(x, width * 2**stage, 2 if number == 0 and stage else 1, bottleneck)
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(x)))


def _residual(x: keras.KerasTensor, channels: int, strides: int, bottleneck: bool) -> keras.KerasTensor:
    import keras

    outputs = 4 * channels if bottleneck else channels
    short = x
    if strides != 1 or x.shape[-1] != outputs:
        short = _conv(x, outputs, 1, strides, active=False)
    x = _conv(_conv(x, channels, 1), channels, 3, strides) if bottleneck else _conv(x, channels, 3, strides)
    return keras.layers.ReLU()(_conv(x, outputs, 1 if bottleneck else 3, active=False) + short)


def _conv(
    x: keras.KerasTensor, channels: int, kernel: int, strides: int = 1, active: bool = True
) -> keras.KerasTensor:
    import keras

    x = keras.layers.Conv2D(channels, kernel, strides, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.layers.ReLU()(x) if active else x


def unet(width: int, depth: int, pixels: int, classes: int, rows: int | None = None) -> keras.Model:
    """Build a U-Net (Ronneberger et al. 2015) with one convolution where that has two; logits of pixels."""
    import keras

    convolution = partial(keras.layers.Conv2D, kernel_size=3, padding="same", activation="relu")
    x = inputs = keras.Input((pixels, pixels, 3), batch_size=rows)
    skipped = []
    for level in range(depth):
        x = convolution(width * 2**level)(x)
        skipped.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = convolution(width * 2**depth)(x)
    for level in reversed(range(depth)):
        x = keras.layers.Concatenate()([keras.layers.UpSampling2D()(x), skipped[level]])
        x = convolution(width * 2**level)(x)
    return keras.Model(inputs, keras.layers.Conv2D(classes, 1)(x))


def text(vocabulary: int, width: int, length: int, rows: int | None = None) -> keras.Model:
    """Build embedded tokens, two convolutions over them, their maxima and two dense layers."""
    import keras

    tokens = keras.Input((length,), dtype="int32", batch_size=rows)
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    x = keras.layers.Conv1D(3 * width, 5, padding="same", activation="relu")(x)
    x = keras.layers.Conv1D(2 * width, 3, padding="same", activation="relu")(x)
    x = keras.layers.Dense(5 * width, activation="relu")(keras.layers.GlobalMaxPooling1D()(x))
    return keras.Model(tokens, keras.layers.Dense(10)(x))


def encoder(
    layers: int, width: int, heads: int, length: int, vocabulary: int, classes: int = 10,
    rows: int | None = None,
) -> keras.Model:  # fmt: skip
    """Build BERT's encoder (Devlin et al. 2019): post-norm blocks, logits of the pooled first token."""
    import keras

    tokens = keras.Input((length,), dtype="int32", batch_size=rows)
    x = keras.layers.LayerNormalization()(_embedded(tokens, vocabulary, width))
    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        inner = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(inner))
    pooled = keras.layers.Dense(width, activation="tanh")(x[:, 0])
    return keras.Model(tokens, keras.layers.Dense(classes)(pooled))


def gpt2(
    layers: int, width: int, heads: int, length: int, vocabulary: int, rows: int | None = None
) -> keras.Model:
    """Build GPT-2 (Radford et al. 2019): pre-norm causal blocks, logits of each next token."""
    import keras

    tokens = keras.Input((length,), dtype="int32", batch_size=rows)
    x = _embedded(tokens, vocabulary, width)
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(heads, width // heads)
        y = keras.layers.LayerNormalization()(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(y)
    return keras.Model(tokens, keras.layers.Dense(vocabulary)(keras.layers.LayerNormalization()(x)))


def _embedded(tokens: keras.KerasTensor, vocabulary: int, width: int) -> keras.KerasTensor:
    """Return tokens (rows, length) as vectors: what each word and each place has learned, added."""
    import keras

    length = tokens.shape[1]
    # Of the tokens: an embedding of a constant would be computed at once, and be no part of the model.
    places = 0 * tokens + np.arange(length, dtype="int32")
    return keras.layers.Embedding(vocabulary, width)(tokens) + keras.layers.Embedding(length, width)(places)


def rnn(depth: int, width: int, length: int, classes: int, rows: int | None = None) -> keras.Model:
    """Build recurrent layers, unrolled: a layer's steps are ops of the graph, as dW cannot leave a loop."""
    import keras

    body = [keras.layers.SimpleRNN(width, return_sequences=n < depth - 1, unroll=True) for n in range(depth)]
    return keras.Sequential(
        [keras.Input((length, width), batch_size=rows), *body, keras.layers.Dense(classes)]
    )


def application(name: str, pixels: int, rows: int | None = None) -> keras.Model:
    """Build a network of keras.applications with ten classes, its weights random; it takes any batch."""
    import keras

    build: Callable[..., keras.Model] = getattr(keras.applications, name)
    shape = (pixels, pixels, 3)
    return build(weights=None, input_shape=shape, classes=10, classifier_activation=None)


def _of_application(name: str, pixels: int, batch: int) -> Network:
    return Network(partial(application, name, pixels), batch, (pixels, pixels, 3))


_IMAGES = (32, 32, 3)
_VGG16 = [(32, 32), (64, 64), (128,) * 3, (256,) * 3, (256,) * 3]  # half of the known channels

DATA_PARALLEL = {
    "mlp": Network(partial(mlp, [1024] * 9 + [10]), 256, (1024,)),
    "mlp_small": Network(partial(mlp, [512] * 9 + [10]), 256, (512,)),
    "mlp_large_batch": Network(partial(mlp, [512] * 9 + [10]), 768, (512,)),
    "mlp_deep": Network(partial(mlp, [512] * 17 + [10]), 768, (512,)),
    "vgg16": Network(partial(convolutions, _VGG16, (2048, 2048)), 32, _IMAGES),
    "resnet50": Network(partial(resnet, (3, 4, 6, 3), 32), 32, _IMAGES),
    "resnet101": Network(partial(resnet, (3, 4, 23, 3), 32), 16, _IMAGES),
    "bert": Network(partial(encoder, 6, 256, 4, 64, 4000), 8, (64,), 4000),
}

# Layers before the output's, and their width.
FEED_FORWARD = (16, 1280)


def bert(layers: int) -> Network:
    """Return one that is deep enough to be cut, and narrow enough for a share of a core."""
    return Network(partial(encoder, layers, 256, 4, 64, 512, 16), 6, (64,), 512, 16)


# Rows of one micro-batch.  A task must take many periods of the CPU quota: a device that has waited runs at
# full speed until its quota of that period is used up, and up to a tick of the clock (4 ms) longer, so that
# tasks of 40 ms take a sixth less than they should.  Of a message of 1 MiB its ends compute 1 to 2 ms less.
# Adding a gradient up takes as long for few rows as for many: 5% of a step for 256 rows of 1024 numbers.
PIPELINE = {
    "feed_forward": Network(
        partial(mlp, [FEED_FORWARD[1]] * (FEED_FORWARD[0] + 1) + [16]), 768, FEED_FORWARD[1:], classes=16
    ),
    "bert12": bert(12),
    "gpt2": Network(partial(gpt2, 12, 256, 4, 64, 512), 12, (64,), 512, 512, labels=(64,)),
    "rnn16": Network(partial(rnn, 16, 512, 8, 16), 192, (8, 512), classes=16),
    "resnet": Network(partial(resnet, (4, 4, 4), 32, 16, False), 24, _IMAGES, classes=16),
}

# Layers of the first differ, and two stages but not three can share them evenly; not even two the second's.
LAYERPIPE = {
    "mlp": Network(partial(mlp, (256, 1536, 1536, 512, 1024, 10)), 1536, (256,)),
    "mlp_square": Network(partial(mlp, (392, 1024, 1024, 1024, 1024, 10)), 3072, (392,)),
    "vgg16": Network(partial(convolutions, _VGG16, (256, 256)), 192, _IMAGES),
    "resnet18": Network(partial(resnet, (2, 2, 2, 2), 16, 10, False), 192, _IMAGES),
    "resnet50": Network(partial(resnet, (3, 4, 6, 3), 16), 96, _IMAGES),
}

# Some are best replicated, some cut, and some both.
MESH = {
    "mlp_even": Network(partial(mlp, (900,) * 9 + (10,)), 192, (900,)),
    "mlp_one_large": Network(partial(mlp, (600, 2600, 1400, 700, 400, 10)), 192, (600,)),
    "mlp_falling": Network(partial(mlp, (1600, 1200, 900, 600, 400, 10)), 256, (1600,)),
    "mlp_few_rows": Network(partial(mlp, (1400,) * 7 + (10,)), 24, (1400,)),
    "cnn": Network(partial(convolutions, [(24, 40), (56, 88)], (200,)), 16, _IMAGES),
    "resnet": Network(partial(resnet, (2, 2, 2), 16, 10, False), 16, _IMAGES),
    "unet": Network(partial(unet, 16, 3, 48, 3), 4, (48, 48, 3), classes=3, labels=(48, 48)),
    "transformer": Network(partial(encoder, 4, 192, 4, 48, 2000), 6, (48,), 2000),
    "gpt2": Network(partial(gpt2, 3, 160, 4, 40, 600), 8, (40,), 600, 600, labels=(40,)),
    "text": Network(partial(text, 5000, 96, 64), 24, (64,), 5000),
}

ONE_CPU = {
    "mlp": DATA_PARALLEL["mlp_small"],
    "mlp_uneven": LAYERPIPE["mlp"],
    "vgg16": DATA_PARALLEL["vgg16"],
    "resnet50": DATA_PARALLEL["resnet50"],
    "bert6": DATA_PARALLEL["bert"],
    "gpt2": PIPELINE["gpt2"],
    "rnn16": PIPELINE["rnn16"],
    "mobilenet_v2": _of_application("MobileNetV2", 96, 16),
    "densenet121": _of_application("DenseNet121", 64, 8),
    "efficientnet_b0": _of_application("EfficientNetB0", 64, 16),
}
