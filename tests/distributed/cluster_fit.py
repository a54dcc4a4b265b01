"""Trains three epochs as a pipeline over a cluster; prints JSON lines.

Arguments: addresses, checkpoint, first epoch, seconds to wait in the second, where to wait: batch, or save,
before the checkpoints of that epoch, one of which replaces the last one; end: behind the last epoch, before
the weights come back; late: before the second epoch's validation, with late gradients; logs: behind the
second epoch's last batch, before its metrics are read; validated: so, but of its validation.  step: does not
wait, but has steps so long that they can be interrupted; raises: so too, and the error ends the process.
python: does not wait, has a loss in Python.
"""

import json
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from tests.scripts import bits_of
from tf_ooo.pipeline.compat import value_of

BATCHES, ROWS = 24, 12
WIDTH, WIDTH_OF_LONG_STEPS = 11, 1500
LONG = ("step", "raises")


def say(**what):
    print(json.dumps(what), flush=True)


class Progress(keras.callbacks.Callback):
    """Says where the second epoch is, so that a worker can be killed there."""

    def __init__(self, pause_s, where):
        super().__init__()
        self._epoch, self._pause_s, self._where = 0, pause_s, where

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self._where in ("batch", *LONG) and self._epoch == 1 and batch == 5:
            self._wait(5)

    def on_train_batch_end(self, batch, logs=None):
        if self._where in LONG and self._epoch == 1 and batch == 5:
            say(ended=5)
        if self._where == "logs" and self._epoch == 1 and batch == BATCHES - 1:
            self._wait(BATCHES)

    def on_test_begin(self, logs=None):
        if self._where == "late" and self._epoch == 1:
            self._wait(BATCHES)

    def on_test_batch_end(self, batch, logs=None):
        if self._where == "validated" and self._epoch == 1 and batch == BATCHES - 1:
            self._wait(BATCHES)

    def on_epoch_end(self, epoch, logs=None):
        if self._where == "save" and epoch == 1:
            self._wait(BATCHES)

    def on_train_end(self, logs=None):
        if self._where == "end":
            self._wait(BATCHES)

    def _wait(self, batch):
        say(epoch=self._epoch, batch=batch)
        time.sleep(float(self._pause_s))


def in_python(truth, made):
    """A loss that no worker can compute by itself."""
    one = tf.numpy_function(lambda array: np.float32(array.size > 0), [made], tf.float32)
    return tf.reduce_mean(tf.square(tf.cast(truth, made.dtype) - made)) * tf.ensure_shape(one, ())


def made(width, loss="mse"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((9,)), *(keras.layers.Dense(width, "tanh") for _ in range(4))])
    model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    return model


def main(addresses, checkpoint, first_epoch, pause_s=0, where="batch"):
    first_epoch = int(first_epoch)
    width = WIDTH_OF_LONG_STEPS if where in LONG else WIDTH
    fresh = made(width, in_python if where == "python" else "mse")
    model = keras.models.load_model(f"{checkpoint}_{first_epoch}.keras") if first_epoch else fresh
    random = np.random.default_rng(0)
    x, y = random.normal(size=(BATCHES * ROWS, 9)), random.normal(size=(BATCHES * ROWS, width))
    parted = {"mode": "pipeline", "microbatches": 3, "schedule": "fast_forward"}
    late = {"mode": "layerpipe", "schedule": "pipedream"}
    pipeline = tf_ooo.OOOBackprop(devices=addresses, **(late if where == "late" else parted))
    saving = keras.callbacks.ModelCheckpoint(f"{checkpoint}_{{epoch}}.keras")
    latest = [keras.callbacks.ModelCheckpoint(f"{checkpoint}.keras")] if where == "save" else []
    progress = Progress(pause_s, where)
    callbacks = [progress, pipeline, saving] if where == "end" else [pipeline, progress, *latest, saving]
    settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "initial_epoch": first_epoch}
    settings |= {"validation_data": (x, y)} if where in ("late", "validated") else {}
    try:
        model.fit(x, y, epochs=3, callbacks=callbacks, **settings)
    except tf_ooo.BackendError as error:
        say(error=str(error), places=sorted({value_of(v).device for v in model.variables}))
        if where == "raises":
            raise
        os._exit(0)
    devices = [stage["device"] for stage in pipeline.report.pipeline["stages"]]
    say(bits=bits_of(model), devices=devices, steps=int(model.optimizer.iterations.numpy()))


if __name__ == "__main__":
    main(*sys.argv[1:])
