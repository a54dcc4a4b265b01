"""Trains on workers that tell their memory, without a limit and with limits; prints JSON lines.

Arguments: addresses, the workers' process ids, the folder they write to, the model.
"""

import gc
import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import tf_ooo
from tf_ooo.bench.peak_memory import now_bytes
from tf_ooo.errors import MemoryLimitError

COUNT = 8


def deep(rows=512, width=512):
    """Activations are most of it."""
    return _dense(rows, width, 12)


def wide(rows=48, width=1024):
    """Weights, their gradients and Adam's slots are."""
    return _dense(rows, width, 8)


def tied(rows=24, words=12, table=9000, width=192):
    """An embedding that is the output's kernel too: its gradient comes from both workers."""

    class Tied(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(table, width)
            self.middle = [keras.layers.Dense(width, activation="relu") for _ in range(4)]

        def call(self, ids):
            x = self.embedding(ids)
            for layer in self.middle:
                x = x + layer(x)
            return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))

    inputs = keras.Input((words,), batch_size=rows * COUNT, dtype="int32")
    random = np.random.default_rng(0)
    x, y = random.integers(0, table, (2, rows * COUNT, words))
    return keras.Model(inputs, Tied()(inputs)), x.astype("int32"), y


def _dense(rows, width, depth):
    inputs = keras.Input((24,), batch_size=rows * COUNT)
    x = inputs
    for _ in range(depth):
        x = keras.layers.Dense(width, activation="relu")(x)
    random = np.random.default_rng(0)
    x_rows = random.normal(size=(rows * COUNT, 24)).astype("float32")
    return keras.Model(inputs, keras.layers.Dense(7)(x)), x_rows, random.integers(0, 7, rows * COUNT)


class Peaks(keras.callbacks.Callback):
    """The most bytes that each worker has had in a step, of the last steps."""

    def __init__(self, processes, folder):
        super().__init__()
        self._of = processes, folder
        self.bytes = []

    def on_train_batch_begin(self, batch, logs=None):
        now_bytes(*self._of)

    def on_train_batch_end(self, batch, logs=None):
        self.bytes = [one["peak"] for one in now_bytes(*self._of)]


def main(addresses, processes, folder, name):
    of_workers = [int(process) for process in processes.split(",")], folder

    def train(schedule, limit=None):
        keras.utils.set_random_seed(3)
        keras.backend.clear_session()
        gc.collect()
        before = [one["current"] for one in now_bytes(*of_workers)]
        model, x, y = globals()[name]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
        pipeline = tf_ooo.OOOBackprop(
            mode="pipeline", devices=addresses, microbatches=COUNT, schedule=schedule, profile_steps=1,
            memory_limit_bytes=limit,
        )  # fmt: skip
        peaks = Peaks(*of_workers)
        model.fit(x, y, batch_size=len(x), epochs=5, verbose=0, callbacks=[pipeline, peaks])
        report = pipeline.report
        return {
            "schedule": report.schedule,
            "limit": limit,
            "before": before,
            "predicted": report.pipeline["predicted_peak_bytes"],
            "measured": peaks.bytes,
        }

    free = train("gpipe")
    print(json.dumps(free), flush=True)
    try:
        train("auto", 1000)
    except MemoryLimitError as error:
        smallest = error.smallest_bytes
    largest = max(free["predicted"])
    for limit in (smallest, int((smallest + largest) / 2)):
        print(json.dumps(train("auto", limit)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
