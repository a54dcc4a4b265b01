"""Write the HLO of compiled training steps, one file for each way."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.gpu.hlo_text import apart
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


def encoder(depth: int, width: int, length: int, rows: int) -> keras.Model:
    """Build the encoder of BERT over vectors (Devlin et al. 2019), with heads of 64."""
    from keras import Input, Model, layers

    x = inputs = Input((length, width), batch_size=rows)
    for _ in range(depth):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(width // 64, 64)(x, x))
        inner = layers.Dense(4 * width, "gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(inner))
    return Model(inputs, layers.Dense(_CLASSES)(x[:, 0]))


def lstm(depth: int, width: int, length: int, rows: int) -> keras.Model:
    """Build LSTM layers, unrolled: dW cannot leave a loop."""
    from keras import Input, Sequential, layers

    body = [layers.LSTM(width, return_sequences=n < depth - 1, unroll=True) for n in range(depth)]
    return Sequential([Input((length, width), batch_size=rows), *body, layers.Dense(_CLASSES)])


_121, _IMAGES = (6, 12, 24, 16), (224, 224, 3)
_MOBILE = {"name": "MobileNetV3Large", "alpha": 0.5}
NETWORKS: dict[str, Callable[..., keras.Model]] = {
    **{f"densenet121-k{growth}": functools.partial(densenet, _121, growth, 32) for growth in (12, 24)},
    "mobilenetv3l-a0.5": Network("application", 32, _IMAGES, _MOBILE).build,
    "resnet50": Network("application", 32, _IMAGES, {"name": "ResNet50"}).build,
    "encoder-6x512": functools.partial(encoder, 6, 512, 128),
    "lstm-2x512": functools.partial(lstm, 2, 512, 16),
    "densenet-small": functools.partial(densenet, (2, 2), 8, 16),
    "rnn-small": functools.partial(lstm, 2, 32, 4),
}

STOCK, APART = "xla", "apart"
# How dW are moved to side streams: arguments of the plan (None: the joint schedule), and of the rewrite.
OURS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "early": ({}, {}),
    "joint": (None, {}),
    "early_no_barriers": ({}, {"store": "none"}),
    "updates_aside": ({}, {"side_updates": True}),
    "two_streams": ({"streams": 2}, {}),
}
WAYS = (STOCK, *OURS, APART)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("network", type=click.Choice(list(NETWORKS)))
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True)
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, default=WAYS, show_default=True)
def main(folder: Path, network: str, batch: int, ways: tuple[str, ...]) -> None:
    """Write FOLDER/NETWORK_bBATCH_WAY.hlo.gz for each way."""
    folder.mkdir(parents=True, exist_ok=True)
    step_as = functools.cache(functools.partial(hlo_of_step, *_compiled(network, batch)))
    for way in ways:
        text = apart(step_as("early")) if way == APART else step_as(way)
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
