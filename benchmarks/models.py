"""Networks with the shapes of known ones, at sizes that two CPU cores can train, and random data for them."""

import importlib
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import KerasTensor, layers
from keras.layers import Dense, LayerNormalization

from benchmarks.cases import WayRun
from benchmarks.kept import largest_difference
from tf_ooo.errors import OptionsError

EXAMPLES = Path(__file__).parents[1] / "examples" / "paper"
Weights = Sequence[np.ndarray]
SEED = 1


@dataclass(frozen=True)
class Network:
    """A model, whose outputs are logits, and the random data it trains on."""

    kind: str  # a function of benchmarks.models
    batch: int  # rows of one micro-batch, or of each worker
    shape: Sequence[int]  # of one row of the input: whole numbers below a vocabulary, or else normal floats
    settings: Mapping[str, Any]  # of the function
    classes: int = 10
    labels: Sequence[int] = ()  # shape of one row

    def build(self, rows: int | None = None) -> keras.Model:
        """Build the model; ``rows``: the size of a batch where the graph is to know it."""
        inputs = keras.Input(self.shape, rows, "int32" if "vocabulary" in self.settings else "float32")
        return keras.Model(inputs, KINDS[self.kind](inputs, self.classes, **self.settings))

    def data(self, rows: int, seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
        random, size = np.random.default_rng(seed), (rows, *self.shape)
        if "vocabulary" in self.settings:
            x = random.integers(0, self.settings["vocabulary"], size).astype("int32")
        else:
            x = random.normal(size=size).astype("float32")
        return x, random.integers(0, self.classes, (rows, *self.labels))

    def optimizer(self, momentum: float = 0.0) -> keras.Optimizer:
        return keras.optimizers.SGD(0.01, momentum)


@dataclass(frozen=True)
class ScriptNetwork:
    """The network of a script of examples/paper at one of its sizes, with some settings changed."""

    script: str
    size: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = "auto"  # or real data, which are downloaded, shipped with a package, or generated

    @property
    def batch(self) -> int:
        return int(self.given().batch)

    def given(self) -> SimpleNamespace:
        """Return what the script's functions are given; OptionsError where it refuses a setting."""
        module = loaded(self.script)
        try:
            settings = loaded("paper_options").changed(module.SIZES, self.size, self.settings)
            of = SimpleNamespace(**settings, data=self.source)
            getattr(module, "check", lambda _: None)(of)
        except ValueError as error:
            raise OptionsError(f"{self.script}: {error}") from None
        return of

    def build(self, rows: int | None = None) -> Any:
        return loaded(self.script).build(self.given(), rows)

    def data(self, rows: int, seed: int = SEED) -> Any:
        """Return the script's inputs and labels, made on the CPU that is no device of the benchmark."""
        import tensorflow as tf

        with tf.device("CPU:0"):
            return loaded(self.script).data(self.given(), rows, seed)

    def optimizer(self, momentum: float = 0.0) -> Any:
        return loaded(self.script).optimizer(self.given())


def loaded(script: str) -> ModuleType:
    """Return the module of a script, whose neighbours it imports."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(script)


# Tasks of PIPELINE must take many periods of the CPU quota: a device that has waited runs at full speed
# until its quota of that period is used up, and up to a tick of the clock (4 ms) longer, so that tasks of 40
# ms take a sixth less than they should.  Of a message of 1 MiB its ends compute 1 to 2 ms less.  Adding a
# gradient up takes as long for few rows as for many: 5% of a step for 256 rows of 1024 numbers.  Layers of
# LAYERPIPE's mlp differ, and two stages but not three can share them evenly; not even two those of its
# mlp_square.  Of MESH some are best replicated, some cut, and some both.
NETWORKS = {
    table: {name: Network(**fields) for name, fields in networks.items()}
    for table, networks in json.loads(Path(__file__).with_name("networks.json").read_text()).items()
}


def network_of(parameters: Mapping[str, Any]) -> Network | ScriptNetwork:
    """Return the network that a case names in a table, or that of its ``script`` of examples/paper."""
    if "script" in parameters:
        return ScriptNetwork(**parameters["script"])
    return NETWORKS[parameters["networks"]][parameters["model"]]


class Workload(NamedTuple):
    """A compiled model and one batch of data for it."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray


def make(network: Network | ScriptNetwork, microbatches: int = 1) -> Workload:
    """Make the same weights and data every time, with a batch of so many times the network's rows."""
    keras.utils.set_random_seed(SEED)
    # Layers get the same names again: what was found in one trace holds for the next.
    keras.backend.clear_session()
    rows = network.batch * microbatches
    model = network.build(rows)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(network.optimizer(), loss, jit_compile=False)
    return Workload(model, *network.data(rows))


def make_devices(count: int) -> None:
    """Make so many devices of the CPU, before TensorFlow's first op."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def weights_of(model: keras.Model) -> Weights:
    """Return all trainable weights."""
    return [variable.numpy() for variable in model.trainable_variables]


def compared(
    runs: Mapping[str, WayRun], trained: Mapping[str, Weights], stock: Weights
) -> tuple[int, dict[str, WayRun]]:
    """Return stock's bits, and runs with what they have trained beside it: bits, the largest difference."""
    with_bits = dict(runs)
    for name, weights in trained.items():
        apart = largest_difference(weights, stock)
        with_bits[name] = replace(runs[name], bits=check_sum(weights), largest_difference=apart)
    return check_sum(stock), with_bits


def check_sum(weights: Weights) -> int:
    """Return a check sum of the bits of all weights."""
    return zlib.crc32(b"".join(weight.tobytes() for weight in weights))


# Networks with the shapes of known ones: each function takes an input of a model and returns its logits.
# Blocks that the paper's networks have, too, are those of their scripts in examples/paper.


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
    return Dense(classes)(Dense(of.width, "tanh")(x[:, 0]))


def encoder_of_vectors(x: KerasTensor, classes: int, **settings: int) -> KerasTensor:
    """Return those of the first vector behind BERT's blocks, which are given vectors."""
    return Dense(classes)(loaded("bert").blocks(x, SimpleNamespace(**settings))[:, 0])


def gpt2(x: KerasTensor, classes: int, **settings: int) -> KerasTensor:
    """Return those of GPT-2's next tokens (Radford et al. 2019), after pre-norm causal blocks."""
    return Dense(classes)(loaded("gpt3").states(x, SimpleNamespace(**settings)))


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
