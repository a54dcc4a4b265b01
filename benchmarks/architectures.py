"""Networks with the shapes of known ones: each function takes an input of a model and returns its logits.

Blocks that the paper's networks have, too, are those of their scripts in examples/paper.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import keras
from keras import KerasTensor, layers
from keras.layers import Dense, LayerNormalization

from benchmarks.models import loaded


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
    x = loaded("resnet").convolved(x, width, 3, -1)
    for stage, count in enumerate(blocks):
        for number in range(count):
            strides = 2 if number == 0 and stage else 1
            x = loaded("resnet").block(x, width * 2**stage, strides, -1, bottleneck)
    return Dense(classes)(layers.GlobalAveragePooling2D()(x))


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


def encoder(x: KerasTensor, classes: int, **settings: int) -> KerasTensor:
    """Return those of BERT's pooled first token (Devlin et al. 2019), after post-norm blocks."""
    of = SimpleNamespace(**settings)
    x = loaded("bert").blocks(LayerNormalization()(loaded("gpt3").embedded(x, of)), of)
    pooled = Dense(of.width, "tanh")(x[:, 0])
    return Dense(classes)(pooled)


def encoder_of_vectors(x: KerasTensor, classes: int, **settings: int) -> KerasTensor:
    """Return those of the first vector behind BERT's blocks, which are given vectors."""
    x = loaded("bert").blocks(x, SimpleNamespace(**settings))
    return Dense(classes)(x[:, 0])


def gpt2(x: KerasTensor, classes: int, **settings: int) -> KerasTensor:
    """Return those of GPT-2's next tokens (Radford et al. 2019), after pre-norm causal blocks."""
    x = loaded("gpt3").states(x, SimpleNamespace(**settings))
    return Dense(classes)(x)


def rnn(x: KerasTensor, classes: int, depth: int, width: int, cell: str = "SimpleRNN") -> KerasTensor:
    """Return those of recurrent layers, unrolled: a layer's steps are ops, as dW cannot leave a loop."""
    for left in reversed(range(depth)):
        x = getattr(layers, cell)(width, return_sequences=left > 0, unroll=True)(x)
    return Dense(classes)(x)


def application(x: KerasTensor, classes: int, name: str, **settings: float) -> KerasTensor:
    """Return those of a network of keras.applications, its weights random."""
    build = getattr(keras.applications, name)
    return build(weights=None, input_tensor=x, classes=classes, classifier_activation=None, **settings).output


KINDS: dict[str, Callable[..., KerasTensor]] = {
    kind.__name__: kind
    for kind in (mlp, convolutions, resnet, unet, text, encoder, encoder_of_vectors, gpt2, rnn, application)
}
