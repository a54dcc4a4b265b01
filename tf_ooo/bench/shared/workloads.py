"""What the benchmarks on several devices train, by their commands' ``--workload``."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tf_ooo.bench.shared.networks import Network, encoder, gpt2, mlp, plain_resnet, resnet, rnn, vgg16
from tf_ooo.bench.shared.scripts import ScriptNetwork

if TYPE_CHECKING:
    import keras
    import numpy as np

SEED = 1
_IMAGES = (32, 32, 3)

DATA_PARALLEL = {
    "mlp": Network(partial(mlp, [1024] * 9 + [10]), 256, (1024,)),
    "mlp_small": Network(partial(mlp, [512] * 9 + [10]), 256, (512,)),
    "mlp_large_batch": Network(partial(mlp, [512] * 9 + [10]), 768, (512,)),
    "mlp_deep": Network(partial(mlp, [512] * 17 + [10]), 768, (512,)),
    "vgg16": Network(partial(vgg16, 0.5, 2048, 32), 32, _IMAGES),
    "resnet50": Network(partial(resnet, (3, 4, 6, 3), 0.5, 32), 32, _IMAGES),
    "resnet101": Network(partial(resnet, (3, 4, 23, 3), 0.5, 32), 16, _IMAGES),
    "bert": Network(partial(encoder, 6, 256, 4, 64, 4000), 8, (64,), tokens=4000),
}

_CLASSES, _VOCABULARY = 16, 512
# Layers before the output's, and their width.
FEED_FORWARD = (16, 1280)


def bert(layers: int) -> Network:
    """Deep enough to be cut, narrow enough for a share of a core."""
    build = partial(encoder, layers, 256, 4, 64, _VOCABULARY, _CLASSES, pooled=True)
    return Network(build, 6, (64,), _VOCABULARY, _CLASSES)


# Rows of one micro-batch.  A task must take many periods of the CPU quota: a device that has waited runs at
# full speed until its quota of that period is used up, and up to a tick of the clock (4 ms) longer, so that
# tasks of 40 ms take a sixth less than they should.  Of a message of 1 MiB its ends compute 1 to 2 ms less.
# Adding a gradient up takes as long for few rows as for many: 5% of a step for 256 rows of 1024 numbers.
PIPELINE = {
    "bert12": bert(12),
    "bert24": bert(24),
    "gpt2": Network(
        partial(gpt2, 12, 256, 4, 64, _VOCABULARY), 12, (64,), _VOCABULARY, _VOCABULARY, labels=(64,)
    ),
    "feed_forward": Network(
        partial(mlp, [FEED_FORWARD[1]] * (FEED_FORWARD[0] + 1) + [_CLASSES]), 768, FEED_FORWARD[1:],
        classes=_CLASSES,
    ),
    "rnn16": Network(partial(rnn, "SimpleRNN", 16, 512, 8, _CLASSES), 192, (8, 512), classes=_CLASSES),
    "resnet": Network(partial(plain_resnet, (4, 4, 4), 32, _CLASSES), 24, _IMAGES, classes=_CLASSES),
}  # fmt: skip

# Plain networks: layers that differ, which two stages but not three share evenly; and the one of
# bench/planner/layerpipe_layers.py at half its widths, which two stages cannot share evenly.
_WIDTHS = (256, 1536, 1536, 512, 1024, 10)
_SQUARE = (392, 1024, 1024, 1024, 1024, 10)
LAYERPIPE = {
    "mlp": Network(partial(mlp, _WIDTHS), 1536, _WIDTHS[:1]),
    "mlp_square": Network(partial(mlp, _SQUARE), 3072, _SQUARE[:1]),
    "vgg16": Network(partial(vgg16, 0.5, 256, 32), 192, _IMAGES),
    "resnet18": Network(partial(plain_resnet, (2, 2, 2, 2), 16, 10), 192, _IMAGES),
    "resnet50": Network(partial(resnet, (3, 4, 6, 3), 0.25, 32), 96, _IMAGES),
}


@dataclass(frozen=True)
class Workload:
    """A compiled model and one batch of made-up data for it."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray


def make(network: Network | ScriptNetwork, microbatches: int = 1, optimizer: str = "") -> Workload:
    """The same weights and data every time, with a batch of so many times the network's rows.

    ``optimizer``: by name, with its own rate; without one a script's own, or plain SGD.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(SEED)
    # Layers get the same names again: what was found in one trace holds for the next.
    keras.backend.clear_session()
    rows = network.batch * microbatches
    model = network.build(rows=rows)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    named = keras.optimizers.get(optimizer) if optimizer else optimizer_of(network)
    model.compile(named, loss, jit_compile=False)
    with tf.device(None):  # scripts may prepare data with TensorFlow, which the model's device is not for
        x, y = network.data(rows, SEED)
    return Workload(model, x, y)


def optimizer_of(network: Network | ScriptNetwork, momentum: float = 0.0) -> keras.Optimizer:
    """A script's own; of other networks SGD."""
    import keras

    if isinstance(network, ScriptNetwork):
        return network.optimizer()
    return keras.optimizers.SGD(0.01, momentum=momentum)


def check_sum(model: keras.Model) -> int:
    """Of the bits of its trainable weights."""
    bits = 0
    for variable in model.trainable_variables:
        bits = zlib.crc32(variable.numpy().tobytes(), bits)
    return bits
