"""LayerPipe on scikit-learn's digits: gradients come late, the test accuracy stays.

Three logical CPU devices stand for three processors; on several GPUs or hosts give ``devices=`` as in
04_pipeline.py.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_ooo

DEVICES, EPOCHS, BATCH, PICTURE = 3, 30, 32, Path("out/layerpipe/accuracy.png")

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
x, x_test, y, y_test = train_test_split(images, labels, test_size=0.3, random_state=0, stratify=labels)


def trained(callbacks):
    """A network's test accuracy after each epoch."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate = keras.optimizers.schedules.CosineDecay(0.1, EPOCHS * (len(x) // BATCH + 1))
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"], jit_compile=False)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        verbose=0,
    )
    return np.array(history.history["val_accuracy"]) * 100


accuracy = {"synchronous": trained([])}
for weights in ("stash", "ema"):
    # Costs by shapes instead of measured ones: the same plan, so the same numbers, on every machine.
    callback = tf_ooo.OOOBackprop(
        mode="layerpipe", schedule="layerpipe", devices=DEVICES, weights=weights, profile_steps=0
    )
    accuracy[f"LayerPipe, {weights}"] = trained([callback])
    print(callback.report.summary())

for name, values in accuracy.items():
    print(f"{name}: test accuracy {values[-1]:.2f}% after {EPOCHS} epochs, best {values.max():.2f}%")

PICTURE.parent.mkdir(parents=True, exist_ok=True)
for name, values in accuracy.items():
    plt.plot(range(1, EPOCHS + 1), values, marker=".", label=name)
plt.xlabel("epoch")
plt.ylabel("test accuracy, %")
plt.legend()
plt.savefig(PICTURE, dpi=120)
print(PICTURE)
