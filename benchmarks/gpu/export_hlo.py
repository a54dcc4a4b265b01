"""Write the HLO of compiled training steps, one file for each way."""

import functools
import gzip
from pathlib import Path
from typing import Any

import click
import keras
import tensorflow as tf
import tomllib

from benchmarks import models
from benchmarks.gpu import hlo_text
from benchmarks.gpu.hlo_text import apart

_CLASSES = 10
NETWORKS = models.NETWORKS["GPU"] | {
    f"densenet121-k{k}": models.ScriptNetwork("densenet", "tiny", {"growth": k, "classes": _CLASSES})
    for k in (12, 24)
}
STOCK, APART = "xla", "apart"
OURS: dict[str, dict[str, Any]] = tomllib.loads(hlo_text.WAYS.read_text())["ours"]
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


def _compiled(name: str, batch: int) -> tuple[Any, tuple[Any, Any]]:
    """Return a model whose variables are all there, and a batch on the device."""
    keras.utils.set_random_seed(models.SEED)
    model = NETWORKS[name].build(batch)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    model.optimizer.build(model.trainable_variables)
    x = tf.random.normal((batch, *model.input_shape[1:]))
    y = tf.random.uniform((batch,), 0, _CLASSES, tf.int32)
    model.compute_loss(y=y, y_pred=model(x))
    return model, (x, y)


def hlo_of_step(model: Any, data: tuple[Any, Any], name: str) -> str:
    """Return the HLO of the model's step, as XLA is given it."""
    from tf_ooo.modes.compiled import planning
    from tf_ooo.modes.compiled.rewrite import rewrite_step
    from tf_ooo.modes.compiled.session import StreamSession
    from tf_ooo.modes.compiled.step import STOCK_WAY, CompiledStep, StreamStep, Way
    from tf_ooo.modes.single_device.options import SingleDevice

    way = STOCK_WAY
    if name != STOCK:
        ours = OURS[name]
        plan = functools.partial(planning.joint, capture=lambda what: planning.capture_of(what, None))
        if "plan" in ours:
            plan = functools.partial(planning.every_layer, **ours["plan"])
        way = Way(functools.partial(rewrite_step, plan=plan, **{"store": "cost", **ours.get("rewrite", {})}))
    session = StreamSession(SingleDevice(schedule="multi_stream", any_platform=True))
    step = CompiledStep(StreamStep(model.train_step, model.train_step, session, way), (data,), {})
    return step.hlo()


if __name__ == "__main__":
    main()
