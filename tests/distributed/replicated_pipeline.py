"""One pipeline of two stages: of a rank on its part of each batch, or alone on all of it.

replicated_pipeline.py FOLDER {replica | joint} SCHEDULE [raise]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from tf_ooo.pipeline.compat import value_of

ROWS, BATCHES, LAST, RANKS = 8, 5, 5, 2


def made():
    keras.utils.set_random_seed(4)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(20, 8)(tokens))
    for width in (33, 21, 17):
        x = keras.layers.Dense(width, activation="tanh")(x)
    model = keras.Model(tokens, keras.layers.Dense(4)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def batches(rank):
    """The last one is smaller, and no multiple of the number of micro-batches."""
    random = np.random.default_rng(50 + rank)
    for number in range(BATCHES):
        x = random.integers(0, 20, size=(LAST if number == BATCHES - 1 else ROWS, 6))
        yield x, x.sum(1) % 4


def data(rank):
    """Of a rank, or of all together."""
    ranks = range(RANKS) if rank is None else [rank]
    for parts in zip(*(batches(one) for one in ranks), strict=True):
        yield tuple(np.concatenate(one) for one in zip(*parts, strict=True))


class Stop(keras.callbacks.Callback):
    """Raises, with the variables away."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("stopped here")


def main(folder, kind, schedule, how=""):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    rank = None
    if kind == "replica":
        from tf_ooo.data_parallel import connect

        rank = connect().rank
    model = made()
    if rank == 1:  # rank 0's weights count
        model.set_weights([weight + 1 for weight in model.get_weights()])
    pipeline = tf_ooo.OOOBackprop(
        mode="pipeline",
        devices=2,
        microbatches=3 if kind == "replica" else 6,
        schedule=schedule,
        replicas=2 if kind == "replica" else None,
    )
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(places(model)))
    callbacks = [pipeline, watch, *([Stop()] if how else [])]
    generated = tf.data.Dataset.from_generator(
        lambda: data(rank),
        output_signature=(tf.TensorSpec((None, 6), tf.int64), tf.TensorSpec((None,), tf.int64)),
    )
    stopped, logs = False, {}
    try:
        logs = model.fit(generated, epochs=4, verbose=0, callbacks=callbacks).history
    except RuntimeError:
        stopped = True
    found = {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "logs": logs,
        "during": seen[-1],
        "after": places(model),
        "stopped": stopped,
        "stages": [stage["layers"] for stage in pipeline.report.pipeline["stages"]],
    }
    (Path(folder) / f"{kind}{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def places(model):
    return sorted({value_of(v).device[-5:] for v in [*model.variables, *model.optimizer.variables]})


if __name__ == "__main__":
    main(*sys.argv[1:])
