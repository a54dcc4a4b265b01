"""One rank of a job of :mod:`benchmarks.runners.horovod`: makes its ways, and trains when it is told to."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.case import Case, Way
from benchmarks.machine import confine
from benchmarks.models import SEED, Weights, network_of, weights_of
from tf_ooo.costs.communication import as_allreduce_bytes

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

# Kinds of ways: where gradients are averaged, and by whom.
APPLY, TAPE, STRATEGY, CALLBACK, LOCAL = "apply", "tape", "strategy", "callback", "local"
# Names of the threads with which TensorFlow's collectives communicate, as far as Linux keeps them.
_COMMUNICATING = ("collective_ops", "event_engine", "grpc")


@dataclass(frozen=True)
class End:
    """A way has come to this; ``weights``: of the first rank alone."""

    weights: Weights
    predicted_s: float | None
    about: dict[str, Any]


def main(case: Case, ways: list[Way], group: str, socket: str, job: int, cluster: list[str]) -> None:
    """Answer until the process is ended.

    ``group``: the prefix of the CPU groups; ``socket``: where the benchmark listens; ``job``: what the rank
    calls itself there; ``cluster``: addresses for TensorFlow's strategy.
    """
    kinds = {way.name: way.options["kind"] for way in ways}
    rank, strategy = int(os.environ["HOROVOD_RANK"]), STRATEGY in kinds.values()
    shares = confine.Shares(group)
    hvd = _confined(shares, rank, cluster if strategy else None)
    import tensorflow as tf

    trainers: dict[str, Trainer] = {}

    def make(name: str) -> dict[str, Any]:
        with shares.lifted(rank):  # what is not measured need not take long
            way = next(way for way in ways if way.name == name)
            trainers[name] = trainer = Trainer(case, way, hvd, rank)
            if trainer.callback is None:
                trainer.warm_up()
        if trainer.callback is not None:  # ours is planned from the times of its first steps
            trainer.warm_up()
        shares.run_first(confine.threads(_COMMUNICATING) if strategy else set())
        return trainer.facts(hvd) if kinds[name] == LOCAL else {}

    def turn(name: str) -> float:
        if hvd is not None:
            hvd.allreduce(tf.zeros([1]), name="turn")
        return trainers[name].turn_s()

    def end(name: str) -> End | None:
        return trainers[name].end() if rank == 0 else None

    tasks: dict[str, Callable[..., Any]] = {"make": make, "turn": turn, "end": end}
    benchmark = Client(socket, "AF_UNIX")  # is closed when the process has said why it ended
    benchmark.send((job, rank, os.getpid()))
    while True:
        task, *arguments = benchmark.recv()
        benchmark.send(tasks[task](*arguments))


def _confined(shares: confine.Shares, rank: int, cluster: list[str] | None) -> Any:
    """Start Horovod, or TensorFlow's strategy; this process then has its share of the CPU."""
    hvd: Any = None
    before = confine.threads()
    if cluster is None:
        hvd = importlib.import_module("horovod.tensorflow")
        hvd.init()
        time.sleep(0.2)
    communicating = confine.threads() - before
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # With one thread a gradient that is to be handed over would wait for the matmul that runs.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    if cluster is not None:
        task = {"cluster": {"worker": cluster}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(task)
        _strategy()
    shares.enter(rank, communicating)
    shares.run_first(communicating)
    confine.keep_memory()
    unrolled = importlib.import_module("tf_ooo.tracing.unrolled")
    unrolled.around_first_runs.append(lambda: shares.lifted(rank))
    return hvd


@functools.cache
def _strategy() -> tf.distribute.Strategy:
    """Return TensorFlow's strategy, which must be there before anything is computed."""
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


class Trainer:
    """One way: a model, its data and how it is trained; it begins again after warming up."""

    def __init__(self, case: Case, way: Way, hvd: Any, rank: int) -> None:
        import keras

        network = network_of(case.parameters)
        kind, self._steps = way.options["kind"], int(case.parameters["steps"])
        together = self._steps if way.options["together"] else 1
        keras.utils.set_random_seed(SEED)
        # Layers get the same names again: TensorFlow adds gradients up in the order of names.
        keras.backend.clear_session()
        with _strategy().scope() if kind == STRATEGY else contextlib.nullcontext():
            self.model, optimizer = network.build(), network.optimizer(momentum=0.9)
            optimizer.build(self.model.trainable_variables)
        if kind == TAPE:
            self.model = _taped(hvd)(self.model.inputs, self.model.outputs)
        if kind == APPLY:
            _average_in_apply(optimizer, hvd)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer, loss, jit_compile=False, steps_per_execution=together)
        self.callback: Any = None
        if kind == CALLBACK:
            import tf_ooo

            options = {"mode": "data_parallel", "unroll": self._steps, **way.options["callback"]}
            self.callback = tf_ooo.OOOBackprop(**options)
        data = network.data(2 * self._steps * network.batch, SEED + rank)
        self._batch = tuple(part[: network.batch] for part in data)
        callbacks = [] if self.callback is None else [self.callback]
        self._train = (
            _strategy_loop(self.model, data, network.batch, together)
            if kind == STRATEGY
            else _fit(self.model, data, network.batch, callbacks)
        )
        self._variables = [*self.model.variables, *optimizer.variables]
        self._first = [variable.numpy() for variable in self._variables]

    def warm_up(self) -> None:
        """Train until everything is traced, planned and decided; then begin again."""
        # Profiled steps come before planned ones are traced: short fits have too few of both.
        for _ in range(1 if self.callback is None else 5):
            self._train()
        # All ranks count the same steps, and decide after the same one.
        while self.callback is not None and self.callback.report.undecided:
            self._train()
        for variable, value in zip(self._variables, self._first, strict=True):
            variable.assign(value)

    def turn_s(self) -> float:
        """Return the seconds of a step, over the second half of some."""
        marks = self._train()
        return (marks[-1] - marks[len(marks) // 2 - 1]) / self._steps

    def facts(self, hvd: Any) -> dict[str, Any]:
        """Return what all ways share: the sizes of a step."""
        import tensorflow as tf

        x, y = self._batch
        with tf.GradientTape() as tape:
            loss = self.model.compute_loss(x, y, self.model(x, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in self.model.trainable_variables])
        floats = 0.0
        for gradient in gradients:  # of a table, the rows of a batch are gathered
            of_rows = isinstance(gradient, tf.IndexedSlices)
            size = int(tf.size(gradient.values if of_rows else gradient))
            floats += as_allreduce_bytes(size, hvd.size()) if of_rows else size
        return {
            "gradient_bytes": round(4 * floats),
            "weights": self.model.count_params(),
            "batch_rows": len(x),
        }

    def end(self) -> End:
        """Return the weights and what was planned."""
        if self.callback is None:
            return End(weights_of(self.model), None, {})
        report = self.callback.report
        about = {"schedule": report.schedule, "reason": report.fallback_reason}
        return End(weights_of(self.model), report.predicted_step_s, about)


def _fit(
    model: keras.Model, data: tuple[np.ndarray, np.ndarray], rows: int, callbacks: list[Any]
) -> Callable[[], list[float]]:
    """Return what trains once on all data, and tells when each execution ended."""
    import keras

    def fit() -> list[float]:
        marks: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: marks.append(time.perf_counter())
        )
        model.fit(*data, batch_size=rows, shuffle=False, verbose=0, callbacks=[*callbacks, note])
        return marks

    return fit


def _strategy_loop(
    model: keras.Model, data: tuple[np.ndarray, np.ndarray], rows: int, together: int
) -> Callable[[], list[float]]:
    """Return TensorFlow's loop for its strategy, as its guide has it, with several steps in a function.

    ``fit`` of Keras 3 does not train with it (keras-team/keras, issue 20585).
    """
    import tensorflow as tf

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        replica = tf.distribute.get_replica_context()
        averaged = replica.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        model.optimizer.apply_gradients(zip(averaged, model.trainable_variables, strict=True))
        return loss

    def steps(batches: Any) -> tf.Tensor:
        return [_strategy().run(step, args=next(batches)) for _ in range(together)][-1]

    execution = tf.function(steps)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(rows)

    def train() -> list[float]:
        batches, marks = iter(dataset), []
        for _ in range(len(data[0]) // rows // together):
            execution(batches).numpy()
            marks.append(time.perf_counter())
        return marks

    return train


def _taped(hvd: Any) -> type[keras.Model]:
    """Return stock Horovod with a train step of one's own: it averages where the tape computes gradients."""
    import keras
    import tensorflow as tf

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


def _average_in_apply(optimizer: keras.Optimizer, hvd: Any) -> None:
    """Make it stock Horovod: it averages where the optimizer applies."""
    apply = optimizer.apply

    def averaging(grads: list[tf.Tensor], variables: list[keras.Variable] | None = None) -> Any:
        return apply([hvd.allreduce(grad, op=hvd.Average) for grad in grads], variables)

    object.__setattr__(optimizer, "apply", averaging)
