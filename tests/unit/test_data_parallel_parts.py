"""Tests what data parallel decides without communicating; ranks are threads here."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_callbacks import OOOBackprop
from tests import zoo
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.ranks.base import Engine, SingleEngine, check_ranks
from tf_ooo.hosts.ranks.collective_engine import CollectiveEngine
from tf_ooo.hosts.ranks.engine import choose_engine
from tf_ooo.hosts.ranks.horovod_engine import HorovodEngine
from tf_ooo.hosts.ranks.launch import mpi_size, resolved_name, tf_config
from tf_ooo.modes.data_parallel import agreement, shard
from tf_ooo.modes.data_parallel.agreement import EpochBegins, EpochEnds, Lockstep
from tf_ooo.modes.data_parallel.ranks import ParallelStep
from tf_ooo.modes.replicated import ReplicatedPipelineMode
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.variables import average_logs, common_spec, optimizers_of


class Threads:
    """Gathers between threads; each may be late."""

    def __init__(self, size: int, delays: random.Random) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=20), [None] * size
        self.delays = delays

    def engine(self, rank: int) -> Any:
        shared = self

        class One:
            size = len(shared.values)

            def gather(self, value: Any) -> list[Any]:
                time.sleep(shared.delays.random() * 0.002)
                shared.values[rank] = value
                shared.barrier.wait()
                out = list(shared.values)
                shared.barrier.wait()
                return out

        return One()


def _fit(lockstep: Lockstep, epochs: int, batches: int, known: bool, stop_at: int, out: list[int]) -> None:
    """The loop of ``model.fit``; stops by itself after ``stop_at`` steps."""
    steps, stopping = 0, False
    for epoch in range(epochs):
        lockstep.begin_epoch(epoch, batches if known else None)
        done = 0
        while not stopping and (done < batches or not known):
            if lockstep.may_run(1 if done < batches else 0) == 0:
                stopping = lockstep.others_ended
                break
            done, steps = done + 1, steps + 1
            stopping = steps == stop_at
        if lockstep.others_ended and not done:
            break
        lockstep.end_epoch(EpochEnds())
        if lockstep.stops(stopping):
            break
    assert lockstep.end(7)
    out.append(steps)


@pytest.mark.parametrize("seed", range(25))
def test_ranks_run_as_many_steps_whoever_is_late(seed):
    """8 random cases each: uneven data, sizes not known, one rank that stops; 2-4 ranks."""
    chance = random.Random(seed)
    for _ in range(8):
        ranks, known = chance.randint(2, 4), chance.random() < 0.5
        asks, counts = chance.choice([(False, False), (True, False), (True, True)])
        threads = Threads(ranks, random.Random(chance.random()))
        may_stop_alone = asks or not known
        everyone_stops = chance.choice([0, chance.randint(1, 9)])
        outs: list[list[int]] = [[] for _ in range(ranks)]
        workers = []
        for rank in range(ranks):
            stop_at = chance.choice([0, chance.randint(1, 9)]) if may_stop_alone else everyone_stops
            lockstep = Lockstep(threads.engine(rank), asks, counts)
            arguments = (lockstep, 3, chance.randint(1, 6), known, stop_at, outs[rank])
            workers.append(threading.Thread(target=_fit, args=arguments, daemon=True))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
        assert all(len(out) == 1 for out in outs), "a rank waits for ever"
        assert len({out[0] for out in outs}) == 1


def test_different_epochs_are_refused():
    threads, errors = Threads(2, random.Random(0)), []

    def begin(rank: int) -> None:
        try:
            Lockstep(threads.engine(rank)).begin_epoch(3 * rank, 5)
        except OptionsError as error:
            errors.append(str(error))

    workers = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert len(errors) == 2
    assert "[0, 3]" in errors[0]


def test_differences_name_rank_place_and_both_values():
    ours = {"weights": [[[3, 4], "float32"], [[4], "float32"]], "options": {"op": "Sum"}}
    theirs = {"weights": [[[3, 5], "float32"], [[4], "float32"]], "options": {"op": "Average"}}
    assert agreement.differences("rank 2", theirs, ours) == [
        'rank 2 has options.op "Average", rank 0 has "Sum"',
        "rank 2 has weights[0][0] [3, 5], rank 0 has [3, 4]",
    ]
    assert agreement.differences("rank 2", ours, ours) == []


def test_logs_are_weighted_by_samples():
    logs = [{"loss": 1.0, "only_here": 5.0}, {"loss": 4.0}]
    assert average_logs(logs, [30, 10]) == {"loss": 1.75, "only_here": 5.0}
    assert average_logs(logs, [0, 0]) == {"loss": 2.5, "only_here": 5.0}


def test_all_optimizers_are_found():
    inner = keras.optimizers.SGD(0.1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(zoo.loss_scaling()(inner), "mse")
    part = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    part.compile("adam", "mse")
    model.part, model.others = part, {"a": [keras.optimizers.Adam(0.1)]}
    found = optimizers_of(model)
    assert len(found) == 4
    assert model.optimizer in found
    assert inner in found
    assert part.optimizer in found
    assert model.others["a"][0] in found


def test_apply_is_put_back_after_an_error():
    optimizer = keras.optimizers.SGD(0.1)
    before = dict(vars(optimizer))
    averaging = Averaging(SingleEngine(), "Average", "none")
    with averaging.active([optimizer]):
        assert vars(optimizer).keys() > before.keys()  # ``apply``, ``apply_gradients``
    with pytest.raises(KeyError), averaging.active([optimizer]):
        {}["missing"]
    assert vars(optimizer) == before


class Scales(SingleEngine):
    """Notes what is reduced, and gives it times 10."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced: list[tuple[str, str]] = []

    def allreduce(self, gradients: Any, op: str, compression: str) -> list[Any]:
        self.reduced += [(op, name.removesuffix("_0")) for name, _ in gradients]
        return [10.0 * gradient for _, gradient in gradients]


@pytest.mark.parametrize("op", ["Sum", "Adasum"])
def test_a_value_that_takes_the_place_of_a_variable_is_averaged_whatever_the_op_is(op: str) -> None:
    """Keras' scales of float8 training: their "gradient" is their next value."""
    variables = [tf.Variable(float(number), name=name) for number, name in enumerate("abc")]
    variables[1].overwrite_with_gradient = True
    engine = Scales()
    averaged = Averaging(engine, op, "none").average([tf.constant(float(n)) for n in (1, 2, 3)], variables)
    assert [float(value) for value in averaged] == [10.0, 20.0, 30.0]
    assert engine.reduced == [(op, "tf_ooo_0_a"), (op, "tf_ooo_2_c"), ("Average", "tf_ooo_1_b")]


def _of_size(kind: Any, size: int) -> Any:
    """An engine that has joined nobody."""
    engine = kind.__new__(kind)
    engine.rank, engine.size = 0, size
    return engine


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
def test_adasum_is_of_pairs_of_ranks(size: int) -> None:
    """Refused before anything is sent."""
    for kind in (HorovodEngine, CollectiveEngine):
        with pytest.raises(BackendError, match=f"op='Adasum' needs 2, 4, 8, ... ranks, not {size}"):
            _of_size(kind, size).allreduce([("a", tf.constant([1.0]))], "Adasum", "none")


def test_adasum_takes_powers_of_two() -> None:
    for size in (1, 2, 4, 8, 64):
        check_ranks(size)


@pytest.mark.parametrize(("of_user", "expected"), [(None, "16384"), ("77", "77")])
def test_horovod_remembers_the_names_of_several_steps(monkeypatch, of_user, expected) -> None:
    """It reads how many when it is initialized; what the user has set stays."""
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "unset at the end")
    monkeypatch.delenv("HOROVOD_CACHE_CAPACITY")
    if of_user is not None:
        monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", of_user)
    at_init: list[str | None] = []
    module = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda: at_init.append(os.environ.get("HOROVOD_CACHE_CAPACITY")),
        **{name: lambda: 1 for name in ("size", "local_rank")},
        rank=lambda: 0,
    )
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(tensorflow=module))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", module)
    assert HorovodEngine().size == 1
    assert at_init == [expected]


def test_broadcast_keeps_shapes_and_types():
    class Copies(SingleEngine):
        size = 2

    values = [np.float32(3), np.arange(4, dtype=np.int64), np.zeros((0, 2)), np.ones((2, 2), bool)]
    for before, after in zip(values, Engine.broadcast(Copies(), values), strict=True):
        assert after.shape == np.shape(before)
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(before, after)


def test_one_process_without_a_launcher(monkeypatch):
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert choose_engine().size == 1
    assert shard(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setenv("TF_CONFIG", "not json")
    with pytest.raises(BackendError, match="TF_CONFIG is not JSON"):
        choose_engine()
    with pytest.raises(OptionsError, match="engine='mpi'"):
        choose_engine("mpi")


TWO = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "expected an object with cluster and task, got \\[\\]"),
        ({"cluster": 3}, "cluster: expected an object of lists of addresses, got 3"),
        ({"cluster": {"worker": "a:1,b:2"}}, "cluster: worker: expected a list of addresses"),
        ({"cluster": {"worker": [1, 2]}}, "cluster: worker: expected a list of addresses"),
        ({"cluster": {"worker": ["a", "b:2"]}}, "worker of the cluster: 'a' is no address"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "worker of the cluster: a:1 is given twice"),
        ({"cluster": TWO}, "task: expected one of the cluster's, such as .*'worker', 'index': 0.*, got None"),
        ({"cluster": TWO, "task": 3}, "task: expected one of the cluster's"),
        ({"cluster": TWO, "task": {"type": "worker", "index": 2}}, "task: expected .*'index': 2"),
        ({"cluster": TWO, "task": {"type": "worker", "index": True}}, "task: expected .*'index': True"),
        ({"cluster": TWO, "task": {"type": "boss", "index": 0}}, "task: expected .*'boss'"),
        ({"cluster": TWO, "task": {"type": ["worker"], "index": 0}}, "task: expected "),
    ],
)
def test_a_tf_config_that_names_no_task_of_a_cluster(monkeypatch, config, said):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(BackendError, match=f"^TF_CONFIG: {said}"):
        tf_config()


@pytest.mark.parametrize("task", [{"type": "worker", "index": "1"}, {"type": "evaluator", "index": 0}])
def test_tasks_that_tensorflow_takes(monkeypatch, task):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO, "task": task}))
    assert tf_config()["task"] == task


def test_collectives_without_a_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(BackendError, match="engine='collectives' needs TF_CONFIG"):
        choose_engine("collectives")


def test_launched_processes_are_not_left_apart(monkeypatch):
    """Modes that would train in each by itself; nothing is joined or waited for."""
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    workers = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": workers, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(BackendError, match="mode='layerpipe' is one process"):
        OOOBackprop(mode="layerpipe")
    for replicas in (None, 1, 2):
        life = OOOBackprop(mode="pipeline", replicas=replicas)._life
        with pytest.raises(BackendError, match="averaged by Horovod"):
            life.begin(None)
    monkeypatch.delenv("TF_CONFIG")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert isinstance(OOOBackprop(mode="pipeline", replicas=1)._life.mode, ReplicatedPipelineMode)
    with pytest.raises(BackendError, match="mode='layerpipe' is one process"):
        OOOBackprop(mode="layerpipe")


class Told:
    """An engine whose other ranks say what they are made to say."""

    def __init__(self, *others: Any) -> None:
        self.others, self.rank, self.size = others, 0, 1 + len(others)

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def is_lost(self, error: BaseException) -> bool:
        return False


def test_dimensions_in_which_ranks_differ_are_open() -> None:
    spec = ({"a": tf.TensorSpec((8, 3), tf.float32)}, tf.TensorSpec((None,), tf.int32), tf.TensorSpec(None))
    common = common_spec(Told([[5, 3], [None], None]), spec)
    assert [one.shape.as_list() if one.shape.rank else None for one in tf.nest.flatten(common)] == [
        [None, 3],
        [None],
        None,
    ]
    assert tf.nest.map_structure(lambda one: one.dtype, common) == ({"a": tf.float32}, tf.int32, tf.float32)
    ragged = tf.RaggedTensorSpec((None, None))
    assert common_spec(Told([[1]]), ragged) is ragged


@pytest.mark.skipif(not zoo.KERAS_3, reason="config of Keras 3")
def test_learning_rates_may_differ_also_within_a_loss_scaling_optimizer() -> None:
    def described(rate: Any, clip: float) -> Any:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        inner = keras.optimizers.SGD(rate, clipnorm=clip)
        model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
        return agreement.description_of(model, optimizers_of(model), {})

    assert described(0.1, 1.0) == described(0.2, 1.0)
    assert described(0.1, 1.0) != described(0.1, 2.0)
    schedules = [keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.5) for rate in (0.1, 0.2)]
    assert described(schedules[0], 1.0) != described(schedules[1], 1.0)


def test_processes_that_mpi_started_are_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "TF_CONFIG", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert (mpi_size(), resolved_name("auto")) == (3, "horovod")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert (mpi_size(), resolved_name("auto")) == (1, "single")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")  # all that srun --mpi=pmix says of it
    assert (mpi_size(), resolved_name("auto")) == (4, "horovod")
    assert resolved_name("collectives") == "collectives"


def test_steps_that_did_not_run_are_still_agreed_on() -> None:
    """Keras ends the epoch; at its end this rank sees that others may wait for it."""

    def function(iterator: Any) -> Any:
        raise tf.errors.OutOfRangeError(None, None, "the end")

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    lockstep = Lockstep(Told(EpochBegins(0, 4).encoded()))
    lockstep.begin_epoch(0, 4)
    step = ParallelStep(function, lockstep.engine, lockstep, model, lambda *_: None, lambda: None)
    step.prepared = True
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iter(()))
    assert lockstep.left == 4
