"""What late gradients do to the test accuracy: scikit-learn's digits, beside stock Keras, same seeds.

Plans are made from costs by shapes, so that the same layers' gradients are late on every machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.single.inputs import digits
from tf_ooo.errors import BackendError
from tf_ooo.modes.layerpipe.options import LayerPipe

if TYPE_CHECKING:
    import keras

BATCH = 32
# A picture of the 540 is 0.19 points.
TEST_SHARE = 0.3
RATE = 0.1
WAYS = {
    "stash": LayerPipe(schedule="layerpipe", weights="stash", profile_steps=0),
    "ema": LayerPipe(schedule="layerpipe", weights="ema", profile_steps=0),
    "latest": LayerPipe(schedule="layerpipe", weights="latest", profile_steps=0),
    "pipedream_2bw": LayerPipe(schedule="pipedream_2bw", profile_steps=0),
}
NETWORKS = ("conv", "mlp")
# Name: falling (to 0 at the end) or constant.
RATES = {"cosine": True, "constant": False}


def _layers(network: str) -> list[keras.Layer]:
    import keras
    from keras import layers

    if network == "conv":  # of examples/05_layerpipe.py
        convolutions = [layers.Conv2D(n, 3, padding="same", activation="relu") for n in (16, 32)]
        hidden = [*convolutions, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(64, activation="relu")]
    else:  # deeper, so that more stages lie behind the first layer
        dense = [layers.Dense(width, activation="relu") for width in (96, 80, 72, 64, 56)]
        hidden = [layers.Flatten(), *dense]
    return [keras.Input((8, 8, 1)), *hidden, layers.Dense(10)]


def percent_by_epoch(network: str, rate: str, seed: int, epochs: int, way: LayerPipe | None) -> list[float]:
    """Percent of the test pictures that are right after each epoch; without a way: stock Keras.

    Raises BackendError where scikit-learn is not installed.
    """
    import keras

    import tf_ooo

    try:
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise BackendError("the digits are scikit-learn's: pip install scikit-learn") from error
    images, labels = digits()
    x, x_test, y, y_test = train_test_split(
        images[..., None], labels, test_size=TEST_SHARE, random_state=0, stratify=labels
    )
    keras.utils.set_random_seed(seed)
    keras.backend.clear_session()
    model = keras.Sequential(_layers(network))
    steps = epochs * -(-len(x) // BATCH)
    rates = keras.optimizers.schedules.CosineDecay(RATE, steps) if RATES[rate] else RATE
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rates), loss, metrics=["accuracy"], jit_compile=False)
    callbacks = [] if way is None else [tf_ooo.OOOBackprop(way)]
    settings = {"batch_size": BATCH, "epochs": epochs, "validation_data": (x_test, y_test), "verbose": 0}
    history = model.fit(x, y, callbacks=callbacks, **settings)
    return [100 * value for value in history.history["val_accuracy"]]


def rows(
    networks: Sequence[str], rates: Sequence[str], devices: Sequence[int], seeds: int, epochs: int
) -> Iterator[Row]:
    """For each combination a row of synchronous training, then one for each way of LayerPipe."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    most = [tf.config.LogicalDeviceConfiguration()] * max(devices)
    tf.config.set_logical_device_configuration(cpu, most)
    for network, rate, count, seed in itertools.product(networks, rates, devices, range(seeds)):
        about = {"network": network, "rate": rate, "devices": count, "seed": seed, "epochs": epochs}
        synchronous = percent_by_epoch(network, rate, seed, epochs, None)
        yield about | _accuracy("synchronous", synchronous, synchronous)
        for name, options in WAYS.items():
            way = replace(options, devices=count)
            percent = percent_by_epoch(network, rate, seed, epochs, way)
            yield about | _accuracy(name, percent, synchronous)


def _accuracy(training: str, percent: list[float], synchronous: list[float]) -> Row:
    return {
        "training": training,
        "test_accuracy_percent": percent[-1],
        "points_below_synchronous": synchronous[-1] - percent[-1],
        "percent_by_epoch": percent,
    }


def text_of(row: Row) -> str:
    """One line."""
    return (
        f"{row['network']:5s} {row['rate']:8s} P={row['devices']} seed {row['seed']} {row['training']:14s} "
        f"{row['test_accuracy_percent']:.2f}%, {row['points_below_synchronous']:+.2f} points below "
        "synchronous"
    )


def summary(rows: Sequence[Row]) -> str:
    """Of each way, the mean and the most that is lost."""
    lines = []
    for way in WAYS:
        lost = [row["points_below_synchronous"] for row in rows if row["training"] == way]
        if not lost:
            continue
        lines.append(
            f"{way}: {statistics.mean(lost):+.2f} points below synchronous on average, "
            f"{min(lost):+.2f} to {max(lost):+.2f} in {len(lost)} runs"
        )
    return "\n".join(lines)
