"""One worker of the data parallel benchmark; started by ``tf_ooo.bench.data_parallel``.

Every configuration trains a model of its own; they take turns, execution by execution.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from tf_ooo.bench import confine

# Name: what the callback is given; None: without tf_ooo.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "horovod": None,
    "local": None,
    "k=0": {"schedule": "reverse_first_k", "k": 0, "profile_steps": 0},
    "reverse_first_k": {"schedule": "reverse_first_k", "profile_steps": 0},
    "search": {"schedule": "search", "profile_steps": 0},
    "auto": {"profile_steps": 2},
}
# Layers, width, rows of a batch.
WORKLOADS = {"mlp_small": (8, 512, 768), "mlp": (8, 1024, 768)}


def main() -> None:
    """Reads the command line; rank 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--workload", default="mlp_small", choices=WORKLOADS)
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--group", default="")
    options = parser.parse_args()
    rank, results = run(options)
    if rank == 0:
        Path(options.out).write_text(json.dumps(results))
    os._exit(0)


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """The rank, and times and reports by configuration."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = confine.threads()
    import horovod.tensorflow as hvd

    hvd.init()
    time.sleep(0.2)
    communicating = confine.threads() - before
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if options.group:
        confine.enter(options.group, hvd.rank(), communicating)
    names = options.configurations.split(",")
    trainers = {name: Trainer(name, options, hvd) for name in names}
    for trainer in trainers.values():
        trainer.warm_up()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repetitions):
        for name in names:
            hvd.allreduce(tf.zeros([1]), name="turn")
            times[name].append(trainers[name].measured_s())
    reduce_s = _reduce_seconds(hvd, trainers[names[0]].model)
    found = {name: trainer.found(times[name]) for name, trainer in trainers.items()}
    return hvd.rank(), {"configurations": found, "communication_s": reduce_s}


def _reduce_seconds(hvd: Any, model: Any) -> float:
    """Seconds of one allreduce as large as all gradients together."""
    import tensorflow as tf

    whole = tf.zeros([sum(int(tf.size(v)) for v in model.trainable_variables)])
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        hvd.allreduce(whole, name="whole").numpy()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


class Trainer:
    """One configuration: a model, its data and how it is trained."""

    def __init__(self, name: str, options: argparse.Namespace, hvd: Any) -> None:
        import numpy as np

        import tf_ooo

        layers, width, self.batch = WORKLOADS[options.workload]
        self.name, self.steps = name, options.steps
        chosen = CONFIGURATIONS[name]
        self.model = _mlp(layers, width, options.steps if chosen is not None else 1)
        if name == "horovod":
            _average_in_apply(self.model.optimizer, hvd)
        self.callback = None if chosen is None else tf_ooo.OOOBackprop(mode="data_parallel", **chosen)
        random = np.random.default_rng(1 + hvd.rank())
        rows = 2 * self.steps * self.batch
        self.x = random.normal(size=(rows, width)).astype("float32")
        self.y = random.integers(0, 10, rows)
        self._first = [v.numpy() for v in (*self.model.variables, *self.model.optimizer.variables)]

    def warm_up(self) -> None:
        """Until everything is traced, planned and decided."""
        for _ in range({"auto": 4, "horovod": 1, "local": 1}.get(self.name, 2)):
            self._fit()
        for variable, value in zip(
            (*self.model.variables, *self.model.optimizer.variables), self._first, strict=True
        ):
            variable.assign(value)

    def measured_s(self) -> float:
        """Seconds of a step, over the second half of some."""
        marks = self._fit()
        half = len(marks) // 2
        seconds: float = (marks[-1] - marks[half - 1]) / self.steps
        return seconds

    def _fit(self) -> list[float]:
        """Trains twice ``steps`` steps; when each execution ended."""
        import keras

        marks: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda b, logs: marks.append(time.perf_counter())
        )
        callbacks = [note] if self.callback is None else [self.callback, note]
        settings = {"batch_size": self.batch, "shuffle": False, "verbose": 0}
        self.model.fit(self.x, self.y, callbacks=callbacks, **settings)
        return marks

    def found(self, seconds: list[float]) -> dict[str, Any]:
        """What rank 0 reports."""
        import zlib

        report = None if self.callback is None else self.callback.report
        bits = 0
        for variable in self.model.trainable_variables:
            bits = zlib.crc32(variable.numpy().tobytes(), bits)
        row: dict[str, Any] = {"seconds": seconds, "bits": bits}
        if report is not None:
            row |= {
                "schedule": report.schedule,
                "reason": report.fallback_reason,
                "predicted_step_s": report.predicted_step_s,
                "plan": None if report.planned is None else report.planned.to_text(),
            }
        return row


def _mlp(layers: int, width: int, steps_per_execution: int) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    inner = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *inner, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(optimizer, loss, jit_compile=False, steps_per_execution=steps_per_execution)
    optimizer.build(model.trainable_variables)
    return model


def _average_in_apply(optimizer: Any, hvd: Any) -> None:
    """Stock Horovod: averaging where the optimizer applies, default fusion and cycle time."""
    apply = optimizer.apply

    def averaging(grads: Any, variables: Any = None) -> Any:
        return apply([hvd.allreduce(grad, op=hvd.Average) for grad in grads], variables)

    object.__setattr__(optimizer, "apply", averaging)


if __name__ == "__main__":
    main()
