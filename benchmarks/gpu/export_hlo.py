"""Write the HLO of compiled training steps, one file for each way."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.models import SEED, Network

if TYPE_CHECKING:
    import keras

_CLASSES = 10


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
    return Model(inputs, layers.Dense(_CLASSES)(layers.GlobalAveragePooling2D()(x)))


NETWORKS: dict[str, Callable[..., keras.Model]] = {
    "densenet121-k12": functools.partial(densenet, (6, 12, 24, 16), 12, 32),
    "mobilenetv3l": Network("application", 32, (224, 224, 3), {"name": "MobileNetV3Large"}).build,
    "resnet50": Network("application", 32, (224, 224, 3), {"name": "ResNet50"}).build,
    "densenet-small": functools.partial(densenet, (2, 2), 8, 16),
    "rnn-small": Network("rnn", 32, (4, 32), {"depth": 2, "width": 32}).build,
}

STOCK = "xla"
# How dW are moved to side streams: arguments of the plan (None: the joint schedule), and of the rewrite.
OURS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "early": ({}, {}),
    "joint": (None, {}),
    "early_no_barriers": ({}, {"store": "none"}),
    "updates_aside": ({}, {"side_updates": True}),
    "two_streams": ({"streams": 2}, {}),
}
WAYS = (STOCK, *OURS)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("network", type=click.Choice(list(NETWORKS)))
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True)
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, default=WAYS, show_default=True)
def main(folder: Path, network: str, batch: int, ways: tuple[str, ...]) -> None:
    """Write FOLDER/NETWORK_bBATCH_WAY.hlo.gz for each way."""
    folder.mkdir(parents=True, exist_ok=True)
    model, data = _compiled(network, batch)
    for way in ways:
        text = hlo_of_step(model, data, way)
        path = folder / f"{network}_b{batch}_{way}.hlo.gz"
        path.write_bytes(gzip.compress(text.encode()))
        click.echo(f"{path}: {len(text) / 1e6:.1f} MB before it was packed")


def _compiled(network: str, batch: int) -> tuple[Any, tuple[Any, Any]]:
    """Return a model whose variables are all there, and a batch on the device."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(SEED)
    model = NETWORKS[network](rows=batch)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    model.optimizer.build(model.trainable_variables)
    x = tf.random.normal((batch, *model.input_shape[1:]))
    y = tf.random.uniform((batch,), 0, _CLASSES, tf.int32)
    model.compute_loss(y=y, y_pred=model(x))
    return model, (x, y)


def hlo_of_step(model: Any, data: tuple[Any, Any], name: str) -> str:
    """Return the HLO of the model's step, as XLA is given it."""
    from tf_ooo.modes.compiled import plans
    from tf_ooo.modes.compiled.rewrite import rewrite_step
    from tf_ooo.modes.compiled.session import StreamSession
    from tf_ooo.modes.compiled.step import STOCK_WAY, CompiledStep, StreamStep, Way
    from tf_ooo.modes.single_device.options import SingleDevice

    way = STOCK_WAY
    if name != STOCK:
        planned, rewritten = OURS[name]
        plan = functools.partial(plans.joint, capture=lambda what: plans.capture_of(what, None))
        if planned is not None:
            plan = functools.partial(plans.every_layer, **planned)
        way = Way(functools.partial(rewrite_step, plan=plan, **{"store": "cost", **rewritten}))
    session = StreamSession(SingleDevice(schedule="multi_stream", any_platform=True))
    step = CompiledStep(StreamStep(model.train_step, model.train_step, session, way), (data,), {})
    return step.hlo()


if __name__ == "__main__":
    main()
