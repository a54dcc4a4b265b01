"""What late gradients do to the test accuracy: scikit-learn's digits, beside stock Keras, same seeds.

Plans are made from costs by shapes, so that the same layers' gradients are late on every machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tf_ooo.bench.shared.rows import Row
from tf_ooo.errors import BackendError

if TYPE_CHECKING:
    import keras
    import numpy as np

    Numbers = np.ndarray[Any, Any]

BATCH = 32
# A picture of the 540 is 0.19 points.
TEST_SHARE = 0.3
RATE = 0.1
MODES: dict[str, dict[str, Any]] = {
    **{weights: {"schedule": "layerpipe", "weights": weights} for weights in ("stash", "ema", "latest")},
    "pipedream_2bw": {"schedule": "pipedream_2bw"},
}
# Name: falling (to 0 at the end) or constant.
RATES = {"cosine": True, "constant": False}


@dataclass(frozen=True)
class Trained:
    """What is trained once in each way: a network, its rate, logical devices, a seed and epochs."""

    network: str
    rate: str
    devices: int
    seed: int
    epochs: int


def digits() -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Pictures and labels to train with, then to test with.

    Raises BackendError where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise BackendError("the digits are scikit-learn's: pip install scikit-learn") from error

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(
        images, labels, test_size=TEST_SHARE, random_state=0, stratify=labels
    )
    return x, y, x_test, y_test


def conv() -> list[keras.Layer]:
    """The network of examples/05_layerpipe.py."""
    from keras import layers

    return [
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]


def mlp() -> list[keras.Layer]:
    """Deeper, so that more stages lie behind the first layer."""
    from keras import layers

    hidden = [layers.Dense(width, activation="relu") for width in (96, 80, 72, 64, 56)]
    return [layers.Flatten(), *hidden, layers.Dense(10)]


NETWORKS: dict[str, Callable[[], list[keras.Layer]]] = {"conv": conv, "mlp": mlp}


def percent_by_epoch(what: Trained, callbacks: Sequence[keras.callbacks.Callback]) -> list[float]:
    """Percent of the test pictures that are right after each epoch."""
    import keras

    x, y, x_test, y_test = digits()
    keras.utils.set_random_seed(what.seed)
    keras.backend.clear_session()
    model = keras.Sequential([keras.Input((8, 8, 1)), *NETWORKS[what.network]()])
    steps = what.epochs * -(-len(x) // BATCH)
    rate = keras.optimizers.schedules.CosineDecay(RATE, steps) if RATES[what.rate] else RATE
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"], jit_compile=False)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=what.epochs, validation_data=(x_test, y_test),
        callbacks=list(callbacks), verbose=0,
    )  # fmt: skip
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
        yield from rows_of(Trained(network, rate, count, seed, epochs))


def rows_of(what: Trained) -> Iterator[Row]:
    """A row of synchronous training, then one for each way of LayerPipe."""
    synchronous = percent_by_epoch(what, [])
    yield _row(what, "synchronous", synchronous, synchronous)
    for way, options in MODES.items():
        yield _row(what, way, percent_by_epoch(what, [_callback(what.devices, options)]), synchronous)


def _callback(devices: int, options: dict[str, Any]) -> keras.callbacks.Callback:
    import tf_ooo

    return tf_ooo.OOOBackprop(tf_ooo.LayerPipe(devices=devices, profile_steps=0, **options))


def _row(what: Trained, way: str, percent: list[float], synchronous: list[float]) -> Row:
    return {
        "network": what.network,
        "rate": what.rate,
        "devices": what.devices,
        "seed": what.seed,
        "epochs": what.epochs,
        "training": way,
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
    for way in MODES:
        lost = [row["points_below_synchronous"] for row in rows if row["training"] == way]
        if not lost:
            continue
        lines.append(
            f"{way}: {statistics.mean(lost):+.2f} points below synchronous on average, "
            f"{min(lost):+.2f} to {max(lost):+.2f} in {len(lost)} runs"
        )
    return "\n".join(lines)
