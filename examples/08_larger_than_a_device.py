"""A transformer that is too large for one worker, trained on four from its first step on.

It learns the text of Python's own library, letter by letter.  Weights, gradients and Adam's two slots need
nearly twice what the plan may give a worker (``memory_limit_bytes``).  So the model is built in this host's
memory, its step is taken apart without running it, and only the stages run, for validation too.

All workers run on this machine.  On four machines start on each, with the same list,
    tf-ooo worker --cluster host1:2222,host2:2222,... --task 0 --insecure-network   (--task 1 on the next)
and give that list as --cluster.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

import tf_ooo
from tf_ooo.hosts.devices import free_ports

WORKERS, LENGTH, LETTERS = 4, 32, 128
BATCH, MICROBATCHES = 16, 4
SHARE = 0.55  # of those bytes, that a worker may use; activations come on top


def text_of_the_library(rows):
    """Rows of LENGTH letters, and each one's next."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in files[:20]).encode("ascii", "replace")
    letters = np.frombuffer(text, np.uint8)[: rows * LENGTH + 1].astype("int32") % LETTERS
    return letters[:-1].reshape(rows, LENGTH), letters[1:].reshape(rows, LENGTH)


class Places(layers.Layer):
    """Adds what each place of a row has learned."""

    def build(self, shape):
        self.places = self.add_weight(shape=shape[1:], initializer="uniform", name="places")

    def call(self, x):
        return x + self.places


def transformer(depth, width):
    """Embeddings, pre-norm causal blocks, the next letter."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Places()(layers.Embedding(LETTERS, width)(tokens))
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(tokens, layers.Dense(LETTERS)(layers.LayerNormalization()(x)))


def main():
    """Starts the workers, trains, prints what each held."""
    text = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**text)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cluster", help="addresses of workers that run already")
    arguments = parser.parse_args()
    if arguments.cluster:
        train(arguments, arguments.cluster)
        return
    cluster = ",".join(f"127.0.0.1:{port}" for port in free_ports(WORKERS))
    command = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--task"]
    workers = [
        subprocess.Popen([*command, str(task)], stdout=subprocess.PIPE, text=True) for task in range(WORKERS)
    ]
    try:
        for worker in workers:
            print(worker.stdout.readline().strip())
        train(arguments, cluster)
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def train(arguments, cluster):
    """Prints how well, and the bytes of each device."""
    keras.utils.set_random_seed(1)
    with tf_ooo.host_memory():
        model = transformer(arguments.layers, arguments.width)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    whole_bytes = 4 * sum(4 * int(np.prod(weight.shape)) for weight in model.weights)
    limit_bytes = int(SHARE * whole_bytes)
    print(
        f"weights, gradients, Adam's slots: {whole_bytes / 1e6:.1f} MB; a worker: {limit_bytes / 1e6:.1f} MB"
    )
    callback = tf_ooo.OOOBackprop(
        tf_ooo.Pipeline(devices=cluster, microbatches=MICROBATCHES, memory_limit_bytes=limit_bytes)
    )
    x, y = text_of_the_library((arguments.steps + 1) * BATCH)
    held_out = (x[-BATCH:], y[-BATCH:])
    fitted = {"batch_size": BATCH, "shuffle": False, "verbose": 2, "validation_data": held_out}
    model.fit(x[:-BATCH], y[:-BATCH], **fitted, callbacks=[callback])
    print(callback.report.headline)
    section = callback.report.pipeline
    for device, peak_bytes in zip(section.devices, section.predicted_peak_bytes, strict=True):
        ranges = [f"{s.layers[0]} .. {s.layers[-1]}" for s in section.stages if s.device == device]
        print(f"{device}: {', '.join(ranges)}; at most {peak_bytes / 1e6:.1f} MB by plan")
    print(f"loss afterwards, on the host: {model.evaluate(*held_out, verbose=0):.3f}")


if __name__ == "__main__":
    main()
