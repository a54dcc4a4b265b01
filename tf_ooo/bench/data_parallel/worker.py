"""One worker of the data parallel benchmark; started by ``tf-ooo bench data-parallel``.

Every configuration trains a model of its own; they take turns, execution by execution.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

import tf_ooo
from tf_ooo.bench.data_parallel.rows import (
    BASELINE,
    COLLECTIVES,
    CONFIGURATIONS,
    LOCAL,
    SAME_STEPS,
    STRATEGY,
    TAPE,
    DataParallelMeasured,
    DataParallelRun,
)
from tf_ooo.bench.data_parallel.strategy import StrategyTrainer, joined
from tf_ooo.bench.data_parallel.turns import InTurns, loss, optimizer
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.scripts import network_of
from tf_ooo.bench.shared.workloads import DATA_PARALLEL, check_sum
from tf_ooo.costs.communication import as_allreduce_bytes
from tf_ooo.tracing import unrolled

# Names of the threads with which TensorFlow's collectives communicate, as far as Linux keeps them.
_COMMUNICATING = ("collective_ops", "event_engine", "grpc")
# Steps of an execution with which two fits trace everything.
_ENOUGH = 4


def main(asked: DataParallelRun) -> None:
    """Trains with all ranks; the first one writes times and plans by configuration."""
    hvd, strategy = _confined(asked)
    trainers: dict[str, Trainer | StrategyTrainer] = {}
    with confine.lifted(asked.group, hvd.rank()):
        for name in asked.configurations:
            if name.startswith(STRATEGY):
                trainers[name] = StrategyTrainer(name, asked, hvd.rank(), strategy)
            else:
                trainers[name] = Trainer(name, asked, hvd)
    for trainer in trainers.values():
        stock = trainer.callback is None
        with confine.lifted(asked.group, hvd.rank()) if stock else contextlib.nullcontext():
            trainer.warm_up()
    confine.run_first(confine.threads_named(_COMMUNICATING))
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(asked.repetitions):
        for name, trainer in trainers.items():
            hvd.allreduce(tf.zeros([1]), name="turn")
            times[name].append(trainer.turn_s())
    any_trainer = next(trainer for trainer in trainers.values() if isinstance(trainer, Trainer))
    sent = any_trainer.sent_floats(hvd.size())
    reduce_s = _reduce_seconds(hvd, sent)
    measured: DataParallelMeasured = {
        "configurations": {name: trainer.measured(times[name]) for name, trainer in trainers.items()},
        "communication_s": reduce_s,
        "gradient_bytes": 4 * sent,
        "workers": hvd.size(),
        "batch_rows": any_trainer.batch,
    }
    if hvd.rank() == 0:
        end_with(measured)
    os._exit(0)


def _confined(asked: DataParallelRun) -> tuple[ModuleType, tf.distribute.Strategy | None]:
    """Starts Horovod, and TensorFlow's strategy where it is compared; from then on this process computes with
    its share of the CPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = confine.threads()
    import horovod.tensorflow as hvd

    hvd.init()
    time.sleep(0.2)
    communicating = confine.threads() - before
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # With one thread a gradient that is to be handed over would wait for the matmul that runs.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    compared = any(name.startswith((STRATEGY, COLLECTIVES)) for name in asked.configurations)
    strategy = joined(asked.cluster, hvd.rank()) if compared else None
    confine.enter(asked.group, hvd.rank(), communicating)
    confine.run_first(communicating)
    confine.keep_memory()
    unrolled.around_first_runs.append(lambda: confine.lifted(asked.group, hvd.rank()))
    return hvd, strategy


def _reduce_seconds(hvd: ModuleType, floats: int) -> float:
    """Seconds of one allreduce of so many numbers, the shortest of three."""
    whole = tf.zeros([floats])
    seconds = []
    for _ in range(4):
        started_s = time.perf_counter()
        hvd.allreduce(whole, name="whole").numpy()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds[1:])


class Trainer(InTurns):
    """One configuration: a model, its data and how it is trained."""

    def __init__(self, name: str, asked: DataParallelRun, hvd: ModuleType) -> None:
        network, options = network_of(DATA_PARALLEL, asked.workload), CONFIGURATIONS[name]
        self._name, self._steps, self.batch = name, asked.steps, asked.rows or network.batch
        keras.utils.set_random_seed(1)
        model = network.build()
        self.model = _taped(hvd)(model.inputs, model.outputs) if name.startswith(TAPE) else model
        self.callback = None
        if options is not None:
            self.callback = tf_ooo.OOOBackprop(mode="data_parallel", unroll=asked.steps, **options)
        alone = options is None and name not in (*SAME_STEPS, LOCAL)
        self.model.compile(
            optimizer(network), loss(), jit_compile=False, steps_per_execution=1 if alone else asked.steps
        )
        self.model.optimizer.build(self.model.trainable_variables)
        if name.startswith(BASELINE) and not name.startswith(TAPE):
            _average_in_apply(self.model.optimizer, hvd)
        self._losses: list[float] = []  # of each fit
        self._x, self._y = network.data(2 * self._steps * self.batch, 1 + hvd.rank())
        self._remember(self.model.optimizer)

    def warm_up(self) -> None:
        """Until everything is traced, planned and decided."""
        auto = self._name == "auto"
        # Profiled steps come before planned ones are traced: short fits have too few of both.
        ours = 2 if self._steps >= _ENOUGH else 4
        for _ in range(5 if auto else 1 if self.callback is None else ours):
            self._fit()
        # All ranks count the same steps, and decide after the same one.
        while auto and self.callback is not None and self.callback.report.undecided:
            self._fit()
        self._begin_again()
        self._losses.clear()

    def _fit(self) -> list[float]:
        marks: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: marks.append(time.perf_counter())
        )
        callbacks = [note] if self.callback is None else [self.callback, note]
        settings = {"batch_size": self.batch, "shuffle": False, "verbose": 0}
        history = self.model.fit(self._x, self._y, callbacks=callbacks, **settings)
        self._losses += history.history["loss"]
        return marks

    def sent_floats(self, workers: int) -> int:
        """Of the allreduce that sends as much as a step: of a table its batch's rows, which are gathered."""
        with tf.GradientTape() as tape:
            result = loss()(self._y[: self.batch], self.model(self._x[: self.batch], training=True))
        gradients = tape.gradient(result, [variable.value for variable in self.model.trainable_variables])
        sizes = [
            as_allreduce_bytes(int(tf.size(gradient.values)), workers)
            if isinstance(gradient, tf.IndexedSlices)
            else int(tf.size(gradient))
            for gradient in gradients
        ]
        return round(sum(sizes))

    def measured(self, seconds: list[float]) -> Row:
        """What rank 0 reports."""
        row: Row = {"seconds": seconds, "bits": check_sum(self.model)}
        row["losses"] = [self._losses[0], self._losses[-1]]
        if self.callback is None:
            return row
        report = self.callback.report
        row |= {"schedule": report.schedule, "reason": report.fallback_reason}
        return row | {"predicted_step_s": report.predicted_step_s}


def _taped(hvd: ModuleType) -> type[keras.Model]:
    """Stock Horovod with a train step of one's own: averaging where the tape computes gradients."""

    class Taped(keras.Model):  # type: ignore[misc]
        def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
            x, y = data
            with tf.GradientTape() as inner:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = [variable.value for variable in self.trainable_variables]
            gradients = hvd.DistributedGradientTape(inner).gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return Taped


def _average_in_apply(optimizer: keras.Optimizer, hvd: ModuleType) -> None:
    """Stock Horovod: averaging where the optimizer applies, default fusion and cycle time."""
    apply = optimizer.apply

    def averaging(grads: list[tf.Tensor], variables: list[keras.Variable] | None = None) -> Any:
        return apply([hvd.allreduce(grad, op=hvd.Average) for grad in grads], variables)

    object.__setattr__(optimizer, "apply", averaging)


if __name__ == "__main__":
    main(*requests(DataParallelRun))
