"""One worker of the data parallel benchmark; started by ``tf_ooo.bench.data_parallel.command``.

Every configuration trains a model of its own; they take turns, execution by execution.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.networks import WORKLOADS, Workload
from tf_ooo.tracing import unrolled

# Name: what the callback is given; None: without tf_ooo.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "horovod": None,
    "horovod_tape": None,
    "local": None,
    "in_order": {"schedule": "in_order", "profile_steps": 0},
    "k=0": {"schedule": "reverse_first_k", "k": 0, "profile_steps": 0},
    "reverse_first_k": {"schedule": "reverse_first_k", "profile_steps": 0},
    "search": {"schedule": "search", "profile_steps": 0},
    "auto": {"profile_steps": 2},
}


def main() -> None:
    """Reads the command line; rank 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--workload", default="mlp", choices=WORKLOADS)
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", type=int, default=0)
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
    # With one thread a gradient that is to be handed over would wait for the matmul that runs.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    if options.group:
        confine.enter(options.group, hvd.rank(), communicating)
        confine.keep_memory()
        unrolled.around_first_runs.append(lambda: confine.lifted(options.group, hvd.rank()))
    names = options.configurations.split(",")
    trainers = {name: Trainer(name, options, hvd) for name in names}
    for trainer in trainers.values():
        free = options.group and trainer.callback is None
        with confine.lifted(options.group, hvd.rank()) if free else contextlib.nullcontext():
            trainer.warm_up()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repetitions):
        for name in names:
            hvd.allreduce(tf.zeros([1]), name="turn")
            times[name].append(trainers[name].measured_s())
    reduce_s = _reduce_seconds(hvd, trainers[names[0]].model)
    found = {name: trainer.found(times[name]) for name, trainer in trainers.items()}
    return hvd.rank(), {"configurations": found, "communication_s": reduce_s, "workers": hvd.size()}


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
        import tf_ooo

        workload = WORKLOADS[options.workload]
        self.name, self.steps, self.batch = name, options.steps, options.rows or workload.batch
        chosen = CONFIGURATIONS[name]
        self.model = _compiled(workload, options.steps if chosen is not None else 1, name, hvd)
        self.callback = (
            None
            if chosen is None
            else tf_ooo.OOOBackprop(mode="data_parallel", unroll=options.steps, **chosen)
        )
        self.x, self.y = workload.data(2 * self.steps * self.batch, 1 + hvd.rank())
        self._first = [v.numpy() for v in (*self.model.variables, *self.model.optimizer.variables)]

    def warm_up(self) -> None:
        """Until everything is traced, planned and decided."""
        for _ in range(5 if self.name == "auto" else 1 if self.callback is None else 2):
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


def _compiled(workload: Workload, steps_per_execution: int, name: str, hvd: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    model = workload.build()
    if name == "horovod_tape":
        model = _taped(hvd)(model.inputs, model.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, loss, jit_compile=False, steps_per_execution=steps_per_execution)
    optimizer.build(model.trainable_variables)
    if name == "horovod":
        _average_in_apply(optimizer, hvd)
    return model


def _taped(hvd: Any) -> Any:
    """Stock Horovod with a train step of one's own: averaging where the tape computes gradients."""
    import keras
    import tensorflow as tf

    class Taped(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as inner:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = [variable.value for variable in self.trainable_variables]
            gradients = hvd.DistributedGradientTape(inner).gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return Taped


def _average_in_apply(optimizer: Any, hvd: Any) -> None:
    """Stock Horovod: averaging where the optimizer applies, default fusion and cycle time."""
    apply = optimizer.apply

    def averaging(grads: Any, variables: Any = None) -> Any:
        return apply([hvd.allreduce(grad, op=hvd.Average) for grad in grads], variables)

    object.__setattr__(optimizer, "apply", averaging)


if __name__ == "__main__":
    main()
