"""What late gradients do to the test accuracy: scikit-learn's digits, beside stock Keras, same seeds.

Plans are made from costs by shapes, so that the same layers' gradients are late on every machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_ooo.errors import BackendError

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


def digits() -> tuple[Any, Any, Any, Any]:
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


def conv(layers: Any) -> list[Any]:
    """The network of examples/05_layerpipe.py."""
    return [
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]


def mlp(layers: Any) -> list[Any]:
    """Deeper, so that more stages lie behind the first layer."""
    hidden = [layers.Dense(width, activation="relu") for width in (96, 80, 72, 64, 56)]
    return [layers.Flatten(), *hidden, layers.Dense(10)]


NETWORKS = {"conv": conv, "mlp": mlp}


def trained(network: str, rate: str, seed: int, epochs: int, callbacks: Sequence[Any]) -> list[float]:
    """Percent of the test pictures that are right after each epoch."""
    import keras

    x, y, x_test, y_test = digits()
    keras.utils.set_random_seed(seed)
    keras.backend.clear_session()
    model = keras.Sequential([keras.Input((8, 8, 1)), *NETWORKS[network](keras.layers)])
    steps = epochs * -(-len(x) // BATCH)
    rates = keras.optimizers.schedules.CosineDecay(RATE, steps) if RATES[rate] else RATE
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rates), loss, metrics=["accuracy"], jit_compile=False)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        validation_data=(x_test, y_test),
        callbacks=list(callbacks),
        verbose=0,
    )
    return [100 * value for value in history.history["val_accuracy"]]


def rows_of(network: str, rate: str, devices: int, seed: int, epochs: int) -> list[dict[str, Any]]:
    """A row for synchronous training and one for each way of LayerPipe, printed as lines too."""
    import tf_ooo

    about = {"network": network, "rate": rate, "devices": devices, "seed": seed, "epochs": epochs}
    rows: list[dict[str, Any]] = []
    for way in ("synchronous", *MODES):
        callbacks = []
        if way in MODES:
            options = tf_ooo.LayerPipe(devices=devices, profile_steps=0, **MODES[way])
            callbacks.append(tf_ooo.OOOBackprop(options))
        percent = trained(network, rate, seed, epochs, callbacks)
        row = {**about, "training": way, "test_accuracy_percent": percent[-1]}
        row["points_below_synchronous"] = rows[0]["test_accuracy_percent"] - percent[-1] if rows else 0.0
        row["percent_by_epoch"] = percent
        rows.append(row)
        print(
            f"{network:5s} {rate:8s} P={devices} seed {seed} {way:14s} {percent[-1]:.2f}%, "
            f"{row['points_below_synchronous']:+.2f} points below synchronous",
            flush=True,
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all and writes the rows."""
    parser = argparse.ArgumentParser("tf-ooo bench layerpipe --accuracy", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--quick", action="store_true", help="one seed, under two minutes")
    parser.add_argument("--network", nargs="+", default=["conv"], choices=NETWORKS)
    parser.add_argument("--rate", nargs="+", default=["cosine"], choices=RATES)
    parser.add_argument("--devices", type=int, nargs="+", default=[3], help="logical CPU devices")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args(arguments)
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    most = [tf.config.LogicalDeviceConfiguration()] * max(options.devices)
    tf.config.set_logical_device_configuration(cpu, most)
    rows: list[dict[str, Any]] = []
    for network in options.network:
        for rate in options.rate:
            for devices in options.devices:
                for seed in range(1 if options.quick else options.seeds):
                    rows += rows_of(network, rate, devices, seed, options.epochs)
                    if options.json:
                        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(summary(rows))


if __name__ == "__main__":
    main()
