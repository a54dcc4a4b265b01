"""Replicas, a pipeline, or replicas of a pipeline: one process trains on four workers, and finds out which.

The model tells from 64 letters of Python's own library which part of it they are from.  Nothing but
``devices=`` is asked for: one device, four replicas, two replicas of two stages and four stages are compared
by simulation of measured costs, the best is taken, and if steps on one worker turn out to be faster, it goes
back to that.  ``--replicas 2`` takes two replicas of two stages, whatever is predicted.

All workers run on this machine, whose cores they share: there one device is often fastest.  On four
machines start on each, with the same list,
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

WORKERS, LENGTH, LETTERS = 4, 64, 128
PARTS = ("asyncio", "email", "http", "importlib", "json", "logging", "unittest", "xml")
BATCH, MICROBATCHES = 128, 8


def letters_of_the_library(rows):
    """Return as many rows of each part, in a random order."""
    random = np.random.default_rng(0)
    texts, labels = [], []
    for label, part in enumerate(PARTS):
        files = sorted((Path(sysconfig.get_path("stdlib")) / part).rglob("*.py"))
        text = "".join(file.read_text(errors="replace") for file in files).encode("ascii", "replace")
        letters = np.frombuffer(text, np.uint8).astype("int32") % LETTERS
        begins = random.integers(0, len(letters) - LENGTH, rows // len(PARTS))
        texts += [letters[begin : begin + LENGTH] for begin in begins]
        labels += [label] * len(begins)
    order = random.permutation(len(labels))
    return np.stack(texts)[order], np.array(labels)[order]


def classifier(width):
    """Embedded letters, convolutions over them, their maxima, dense layers."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(LETTERS, width)(tokens)
    for factor in (2, 3, 4):
        x = layers.Conv1D(factor * width, 5, padding="same", activation="relu")(x)
    x = layers.Dense(4 * width, activation="relu")(layers.GlobalMaxPooling1D()(x))
    return keras.Model(tokens, layers.Dense(len(PARTS))(x))


def main():
    """Starts the workers, trains, prints what was compared."""
    text = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**text)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--replicas", type=int, help="so many; left out: the best of all")
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
    """Prints what was compared, and what was gained."""
    keras.utils.set_random_seed(1)
    model = classifier(arguments.width)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    chosen = {} if arguments.replicas is None else {"mode": "pipeline", "replicas": arguments.replicas}
    callback = tf_ooo.OOOBackprop(devices=cluster, microbatches=MICROBATCHES, compare=True, **chosen)
    x, y = letters_of_the_library(arguments.steps * BATCH)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=2, callbacks=[callback])
    section = callback.report.pipeline
    for row in section.compared_replicas:
        print(row.text())
    for number, names in enumerate(section.replica_devices):
        print(f"replica {number}: {', '.join(names)}")
    print(callback.report.headline)
    print(callback.report.state)


if __name__ == "__main__":
    main()
