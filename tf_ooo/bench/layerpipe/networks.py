"""Models and batches of the LayerPipe benchmark, at widths that a share of a core can train."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tf_ooo.bench.shared.networks import Network, mlp, resnet, vgg16
from tf_ooo.bench.shared.workloads import SEED, Workload, compiled, residual

if TYPE_CHECKING:
    import keras

# Tasks must take many periods of the CPU quota: see shared/workloads.py.
_ROWS = 192
# Plain networks: layers that differ, which two stages but not three share evenly; and the one of
# bench/planner/layerpipe_layers.py at half its widths, which two stages cannot share evenly.
_WIDTHS = (256, 1536, 1536, 512, 1024, 10)
_SQUARE = (392, 1024, 1024, 1024, 1024, 10)


def _resnet18() -> keras.Model:
    """ResNet-18 (He et al. 2016) with a quarter of its channels."""
    import keras

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    for stage in range(4):
        for block in range(2):
            x = residual(x, 16 * 2**stage, 2 if stage and not block else 1)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


NETWORKS: dict[str, Network] = {
    "mlp": Network(partial(mlp, _WIDTHS), 8 * _ROWS, (_WIDTHS[0],)),
    "mlp_square": Network(partial(mlp, _SQUARE), 16 * _ROWS, (_SQUARE[0],)),
    "vgg16": Network(lambda: vgg16(0.5, 256, 32), _ROWS, (32, 32, 3)),
    "resnet18": Network(_resnet18, _ROWS, (32, 32, 3)),
    "resnet50": Network(lambda: resnet((3, 4, 6, 3), 0.25, 32), _ROWS // 2, (32, 32, 3)),
}
# In one function; tracing eight of a deep network takes longer than measuring it.
ROUNDS = {"mlp": 8, "mlp_square": 8, "vgg16": 4, "resnet18": 4, "resnet50": 2}


def make(name: str) -> Workload:
    """A compiled model and one batch of made-up data for it."""
    import keras

    keras.utils.set_random_seed(SEED)
    network = NETWORKS[name]
    return compiled(network.build(), *network.data(network.batch, SEED))
