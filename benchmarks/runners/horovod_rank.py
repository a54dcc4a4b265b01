"""One rank of a job of :mod:`benchmarks.runners.horovod`: makes its ways, and trains when it is told to."""

import contextlib
import functools
import importlib
import json
import os
import time
from typing import Any

import keras
import tensorflow as tf

import tf_ooo
from benchmarks.cases import Case, Way, WayRun
from benchmarks.machine.confine import Shares, keep_memory, threads
from benchmarks.models import SEED, Weights, network_of, weights_of
from benchmarks.processes import answer
from benchmarks.runners.horovod import APPLY, CALLBACK, LOCAL, STRATEGY, TAPE
from tf_ooo.costs.communication import as_allreduce_bytes
from tf_ooo.tracing import flat

# Names of the threads with which TensorFlow's collectives communicate, as far as Linux keeps them.
_COMMUNICATING = ("collective_ops", "event_engine", "grpc")


def main(case: Case, ways: list[Way], group: str, address: str, cluster: list[str]) -> None:
    """Answer until the process is ended.

    ``group``: the folder of the CPU groups; ``cluster``: addresses for TensorFlow's strategy.
    """
    rank, strategy = int(os.environ["HOROVOD_RANK"]), ways[0].options["kind"] == STRATEGY
    shares, trainers = Shares(group), dict[str, Trainer]()
    hvd = _confined(shares, rank, cluster if strategy else None)

    def make(name: str) -> dict[str, Any]:
        with shares.lifted(rank):  # what is not measured need not take long
            way = next(way for way in ways if way.name == name)
            trainers[name] = trainer = Trainer(case, way, hvd, rank)
            if trainer.callback is None:
                trainer.warm_up()
        if trainer.callback is not None:  # ours is planned from the times of its first steps
            trainer.warm_up()
        shares.run_first(threads(_COMMUNICATING) if strategy else set())
        return trainer.facts(hvd) if way.options["kind"] == LOCAL else {}

    def turn(name: str) -> float:
        if hvd is not None:
            hvd.allreduce(tf.zeros([1]), name="turn")
        return trainers[name].turn_s()

    answer(address, rank, {"make": make, "turn": turn, "end": lambda name: trainers[name].end()})


def _confined(shares: Shares, rank: int, cluster: list[str] | None) -> Any:
    """Start Horovod, or TensorFlow's strategy; this process then has its share of the CPU."""
    hvd: Any = None
    before = threads()
    if cluster is None:
        hvd = importlib.import_module("horovod.tensorflow")
        hvd.init()
        time.sleep(0.2)
    communicating = threads() - before
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # With one thread a gradient that is to be handed over would wait for the matmul that runs.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    if cluster is not None:
        task = {"cluster": {"worker": cluster}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(task)
        _strategy()
    shares.enter(rank, communicating)
    shares.run_first(communicating)
    keep_memory()
    flat.around_first_runs.append(lambda: shares.lifted(rank))
    return hvd


@functools.cache
def _strategy() -> tf.distribute.Strategy:
    """Return TensorFlow's strategy, which must be there before anything is computed."""
    return tf.distribute.MultiWorkerMirroredStrategy()


class Trainer:
    """One way: a model, its data and how it is trained; it begins again after warming up."""

    def __init__(self, case: Case, way: Way, hvd: Any, rank: int) -> None:
        network, kind = network_of(case.parameters), way.options["kind"]
        self._steps, rows = int(case.parameters["steps"]), network.batch
        together = self._steps if way.options["together"] else 1
        keras.utils.set_random_seed(SEED)
        # Layers get the same names again: TensorFlow adds gradients up in the order of names.
        keras.backend.clear_session()
        with _strategy().scope() if kind == STRATEGY else contextlib.nullcontext():
            self.model, optimizer = network.build(), network.optimizer(momentum=0.9)
            optimizer.build(self.model.trainable_variables)
        if kind == TAPE:
            self.model.train_step = functools.partial(_taped_step, self.model, hvd)
        if kind == APPLY:
            _average_in_apply(optimizer, hvd)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer, loss, jit_compile=False, steps_per_execution=together)
        options = {"mode": "data_parallel", "unroll": self._steps, **way.options.get("callback", {})}
        self.callback = tf_ooo.OOOBackprop(**options) if kind == CALLBACK else None
        self._rows, self._data = rows, network.data(2 * self._steps * rows, SEED + rank)
        self._execution = _execution(self.model, together) if kind == STRATEGY else None
        self._variables = [*self.model.variables, *optimizer.variables]
        self._first = [variable.numpy() for variable in self._variables]

    def warm_up(self) -> None:
        """Train until everything is traced, planned and decided; then begin again."""
        # Profiled steps come before planned ones are traced: short fits have too few of both.
        for _ in range(1 if self.callback is None else 5):
            self.train()
        # All ranks count the same steps, and decide after the same one.
        while self.callback is not None and self.callback.report.undecided:
            self.train()
        for variable, value in zip(self._variables, self._first, strict=True):
            variable.assign(value)

    def train(self) -> list[float]:
        """Train once on all data, and tell when each execution ended."""
        marks: list[float] = []
        if self._execution is None:
            note = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: marks.append(time.perf_counter())
            )
            callbacks = [self.callback, note] if self.callback else [note]
            given = {"batch_size": self._rows, "shuffle": False, "verbose": 0, "callbacks": callbacks}
            self.model.fit(*self._data, **given)
            return marks
        batches = iter(tf.data.Dataset.from_tensor_slices(self._data).batch(self._rows))
        for _ in range(len(self._data[0]) // self._rows // self.model.steps_per_execution):
            self._execution(batches).numpy()
            marks.append(time.perf_counter())
        return marks

    def turn_s(self) -> float:
        """Return the seconds of a step, over the second half of some."""
        marks = self.train()
        return (marks[-1] - marks[len(marks) // 2 - 1]) / self._steps

    def facts(self, hvd: Any) -> dict[str, Any]:
        """Return what all ways share: the sizes of a step."""
        batch = [part[: self._rows] for part in self._data]
        floats, (_, gradients) = 0.0, _gradients(self.model, *batch)
        for gradient in gradients:  # of a table, the rows of a batch are gathered
            of_rows = isinstance(gradient, tf.IndexedSlices)
            size = int(tf.size(gradient.values if of_rows else gradient))
            floats += as_allreduce_bytes(size, hvd.size()) if of_rows else size
        sizes = {"gradient_bytes": round(4 * floats), "weights": self.model.count_params()}
        return {**sizes, "batch_rows": self._rows}

    def end(self) -> tuple[Weights, WayRun]:
        """Return the weights and what was planned."""
        if self.callback is None:
            return weights_of(self.model), WayRun([])
        report = self.callback.report
        about = {"schedule": report.schedule, "reason": report.fallback_reason}
        return weights_of(self.model), WayRun([], report.predicted_step_s, about=about)


def _execution(model: keras.Model, together: int) -> Any:
    """Return TensorFlow's loop for its strategy, as its guide has it, with several steps in a function.

    ``fit`` of Keras 3 does not train with it (keras-team/keras, issue 20585).
    """

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss, gradients = _gradients(model, x, y)
        averaged = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        model.optimizer.apply_gradients(zip(averaged, model.trainable_variables, strict=True))
        return loss

    def steps(batches: Any) -> tf.Tensor:
        return [_strategy().run(step, args=next(batches)) for _ in range(together)][-1]

    return tf.function(steps)


def _gradients(model: keras.Model, x: Any, y: Any, kind: Any = lambda tape: tape) -> tuple[Any, list[Any]]:
    """Return loss and gradients; ``kind``: makes another tape of TensorFlow's."""
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    return loss, kind(tape).gradient(loss, [variable.value for variable in model.trainable_variables])


def _taped_step(model: keras.Model, hvd: Any, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Make it stock Horovod with a train step of one's own: it averages where the tape computes gradients."""
    loss, gradients = _gradients(model, *data, hvd.DistributedGradientTape)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss}


def _average_in_apply(optimizer: keras.Optimizer, hvd: Any) -> None:
    """Make it stock Horovod: it averages where the optimizer applies."""
    apply = optimizer.apply

    def averaging(grads: list[tf.Tensor], variables: list[keras.Variable] | None = None) -> Any:
        return apply([hvd.allreduce(grad, op=hvd.Average) for grad in grads], variables)

    object.__setattr__(optimizer, "apply", averaging)
