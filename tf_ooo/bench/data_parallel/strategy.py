"""TensorFlow's own data parallel training, ``MultiWorkerMirroredStrategy``, to compare with.

``fit`` of Keras 3 does not train with it (keras-team/keras, issue 20585); this is the loop of TensorFlow's
guide for it, with as many steps in one ``tf.function`` as ours has.
"""

from __future__ import annotations

import json
import os
import time

import keras
import tensorflow as tf

from tf_ooo.bench.data_parallel.rows import STRATEGY_SAME_STEPS, DataParallelRun
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.workloads import DATA_PARALLEL, check_sum


def joined(cluster: str, rank: int) -> tf.distribute.Strategy:
    """The strategy over ``cluster``, addresses with commas; before TensorFlow has computed anything."""
    workers = {"cluster": {"worker": cluster.split(",")}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(workers)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    del os.environ["TF_CONFIG"]  # nobody else is to find workers there
    return strategy


class StrategyTrainer:
    """As :class:`tf_ooo.bench.data_parallel.worker.Trainer`."""

    callback = None

    def __init__(
        self, name: str, asked: DataParallelRun, rank: int, strategy: tf.distribute.Strategy
    ) -> None:
        network = DATA_PARALLEL[asked.workload]
        self._strategy, self._steps = strategy, asked.steps
        self._together = asked.steps if name == STRATEGY_SAME_STEPS else 1
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = network.build()
            self._optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
            self._optimizer.build(self.model.trainable_variables)
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        batch = asked.rows or network.batch
        self._data = tf.data.Dataset.from_tensor_slices(network.data(2 * asked.steps * batch, 1 + rank))
        self._data = self._data.batch(batch).repeat()
        self._run = tf.function(self._execution)
        self._variables = [*self.model.variables, *self._optimizer.variables]
        self._first = [variable.numpy() for variable in self._variables]

    def warm_up(self) -> None:
        """Until everything is traced."""
        self._fit()
        for variable, value in zip(self._variables, self._first, strict=True):
            variable.assign(value)

    def turn_s(self) -> float:
        """Seconds of a step, over the second half of some."""
        marks = self._fit()
        half = len(marks) // 2
        return (marks[-1] - marks[half - 1]) / self._steps

    def measured(self, seconds: list[float]) -> Row:
        """What rank 0 reports."""
        return {"seconds": seconds, "bits": check_sum(self.model)}

    def _fit(self) -> list[float]:
        """Trains twice ``steps`` steps; when each execution ended."""
        batches, marks = iter(self._data), []
        for _ in range(2 * self._steps // self._together):
            self._run(batches).numpy()
            marks.append(time.perf_counter())
        return marks

    def _execution(self, batches: tf.data.Iterator) -> tf.Tensor:
        loss = tf.zeros([])
        for _ in range(self._together):
            loss = self._strategy.run(self._step, args=next(batches))
        return loss

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._loss(y, self.model(x, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in self.model.trainable_variables])
        replica = tf.distribute.get_replica_context()
        averaged = replica.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        self._optimizer.apply_gradients(zip(averaged, self.model.trainable_variables, strict=True))
        return loss
