"""Networks with the shapes of known ones: each function takes an input of a model and returns its logits."""

from collections.abc import Callable, Sequence

import keras
import numpy as np
from keras import KerasTensor, layers
from keras.layers import Dense, LayerNormalization, MultiHeadAttention


def mlp(x: KerasTensor, classes: int, widths: Sequence[int]) -> KerasTensor:
    """Return the logits of dense layers of so many units."""
    for width in widths:
        x = Dense(width, "relu")(x)
    return Dense(classes)(x)


def convolutions(
    x: KerasTensor, classes: int, blocks: Sequence[Sequence[int]], dense: Sequence[int]
) -> KerasTensor:
    """Return those of 3 x 3 convolutions of so many channels, pooling after each block, and dense layers."""
    for block in blocks:
        for channels in block:
            x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    return mlp(layers.Flatten()(x), classes, dense)


def resnet(x: KerasTensor, classes: int, blocks: Sequence[int], width: int, bottleneck: bool) -> KerasTensor:
    """Return those of a ResNet (He et al. 2016) with so many blocks a stage.

    ``width``: channels of the first stage; ``bottleneck``: blocks have three convolutions, the last one to
    four times the channels; else two.
    """
    x = _conv(x, width, 3)
    for stage, count in enumerate(blocks):
        for number in range(count):
            x = _residual(x, width * 2**stage, 2 if number == 0 and stage else 1, bottleneck)
    return Dense(classes)(layers.GlobalAveragePooling2D()(x))


def _residual(x: KerasTensor, channels: int, strides: int, bottleneck: bool) -> KerasTensor:
    outputs = 4 * channels if bottleneck else channels
    short = x
    if strides != 1 or x.shape[-1] != outputs:
        short = _conv(x, outputs, 1, strides, active=False)
    x = _conv(_conv(x, channels, 1), channels, 3, strides) if bottleneck else _conv(x, channels, 3, strides)
    return layers.ReLU()(_conv(x, outputs, 1 if bottleneck else 3, active=False) + short)


def _conv(x: KerasTensor, channels: int, kernel: int, strides: int = 1, active: bool = True) -> KerasTensor:
    x = layers.Conv2D(channels, kernel, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return layers.ReLU()(x) if active else x


def unet(x: KerasTensor, classes: int, width: int, depth: int) -> KerasTensor:
    """Return those of a U-Net's pixels (Ronneberger et al. 2015), with one convolution where that has two."""
    skipped = []
    for level in range(depth):
        x = layers.Conv2D(width * 2**level, 3, padding="same", activation="relu")(x)
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(width * 2**depth, 3, padding="same", activation="relu")(x)
    for level in reversed(range(depth)):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skipped[level]])
        x = layers.Conv2D(width * 2**level, 3, padding="same", activation="relu")(x)
    return layers.Conv2D(classes, 1)(x)


def text(x: KerasTensor, classes: int, vocabulary: int, width: int) -> KerasTensor:
    """Return those of embedded tokens, two convolutions over them, their maxima and two dense layers."""
    x = layers.Embedding(vocabulary, width)(x)
    x = layers.Conv1D(3 * width, 5, padding="same", activation="relu")(x)
    x = layers.Conv1D(2 * width, 3, padding="same", activation="relu")(x)
    return mlp(layers.GlobalMaxPooling1D()(x), classes, [5 * width])


def encoder(
    x: KerasTensor, classes: int, layers: int, width: int, heads: int, vocabulary: int
) -> KerasTensor:
    """Return those of BERT's pooled first token (Devlin et al. 2019), after post-norm blocks."""
    x = LayerNormalization()(_embedded(x, vocabulary, width))
    for _ in range(layers):
        attended = MultiHeadAttention(heads, width // heads)(x, x)
        x = LayerNormalization()(x + attended)
        inner = Dense(4 * width, "gelu")(x)
        x = LayerNormalization()(x + Dense(width)(inner))
    pooled = Dense(width, "tanh")(x[:, 0])
    return Dense(classes)(pooled)


def gpt2(x: KerasTensor, classes: int, layers: int, width: int, heads: int, vocabulary: int) -> KerasTensor:
    """Return those of GPT-2's next tokens (Radford et al. 2019), after pre-norm causal blocks."""
    x = _embedded(x, vocabulary, width)
    for _ in range(layers):
        attention = MultiHeadAttention(heads, width // heads)
        y = LayerNormalization()(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = Dense(4 * width, "gelu")(LayerNormalization()(x))
        x = x + Dense(width)(y)
    return Dense(classes)(LayerNormalization()(x))


def _embedded(tokens: KerasTensor, vocabulary: int, width: int) -> KerasTensor:
    """Return tokens (rows, length) as vectors: what each word and each place has learned, added."""
    # Places follow from the tokens: an embedding of a constant would be computed at once, outside the model.
    places = 0 * tokens + np.arange(tokens.shape[1], dtype="int32")
    words = layers.Embedding(vocabulary, width)(tokens)
    return words + layers.Embedding(tokens.shape[1], width)(places)


def rnn(x: KerasTensor, classes: int, depth: int, width: int) -> KerasTensor:
    """Return those of recurrent layers, unrolled: a layer's steps are ops, as dW cannot leave a loop."""
    for left in reversed(range(depth)):
        x = layers.SimpleRNN(width, return_sequences=left > 0, unroll=True)(x)
    return Dense(classes)(x)


def application(x: KerasTensor, classes: int, name: str, **settings: float) -> KerasTensor:
    """Return those of a network of keras.applications, its weights random."""
    build = getattr(keras.applications, name)
    return build(weights=None, input_tensor=x, classes=classes, classifier_activation=None, **settings).output


KINDS: dict[str, Callable[..., KerasTensor]] = {
    kind.__name__: kind for kind in (mlp, convolutions, resnet, unet, text, encoder, gpt2, rnn, application)
}
