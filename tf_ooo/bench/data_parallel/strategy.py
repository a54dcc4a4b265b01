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
from tf_ooo.bench.data_parallel.turns import InTurns, loss, optimizer
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.scripts import network_of
from tf_ooo.bench.shared.workloads import DATA_PARALLEL, check_sum
from tf_ooo.hosts.ranks.collective_engine import CollectiveEngine
from tf_ooo.hosts.ranks.engine import choose_engine


def joined(cluster: str, rank: int) -> tf.distribute.Strategy:
    """The strategy over ``cluster``, addresses with commas; before TensorFlow has computed anything.

    It is that of our engine for TensorFlow's collectives: a process joins them once.
    """
    workers = {"cluster": {"worker": cluster.split(",")}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(workers)
    engine = choose_engine("collectives")
    del os.environ["TF_CONFIG"]  # nobody else is to find workers there
    assert isinstance(engine, CollectiveEngine)
    return engine.strategy


class StrategyTrainer(InTurns):
    """As :class:`tf_ooo.bench.data_parallel.worker.Trainer`."""

    callback = None

    def __init__(
        self, name: str, asked: DataParallelRun, rank: int, strategy: tf.distribute.Strategy
    ) -> None:
        network = network_of(DATA_PARALLEL, asked.workload)
        self._strategy, self._steps = strategy, asked.steps
        self._together = asked.steps if name == STRATEGY_SAME_STEPS else 1
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = network.build()
            self._optimizer = optimizer(network)
            self._optimizer.build(self.model.trainable_variables)
        self._loss = loss()
        batch = asked.rows or network.batch
        self._data = tf.data.Dataset.from_tensor_slices(network.data(2 * asked.steps * batch, 1 + rank))
        self._data = self._data.batch(batch).repeat()
        self._run = tf.function(self._execution)
        self._remember(self._optimizer)

    def warm_up(self) -> None:
        """Until everything is traced."""
        self._fit()
        self._begin_again()

    def measured(self, seconds: list[float]) -> Row:
        """What rank 0 reports."""
        return {"seconds": seconds, "bits": check_sum(self.model)}

    def _fit(self) -> list[float]:
        batches, marks = iter(self._data), []
        for _ in range(2 * self._steps // self._together):
            self._run(batches).numpy()
            marks.append(time.perf_counter())
        return marks

    def _execution(self, batches: tf.data.Iterator) -> tf.Tensor:
        result = tf.zeros([])
        for _ in range(self._together):
            result = self._strategy.run(self._step, args=next(batches))
        return result

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            result = self._loss(y, self.model(x, training=True))
        gradients = tape.gradient(result, [variable.value for variable in self.model.trainable_variables])
        replica = tf.distribute.get_replica_context()
        averaged = replica.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        self._optimizer.apply_gradients(zip(averaged, self.model.trainable_variables, strict=True))
        return result
