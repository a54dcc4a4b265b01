"""Two of three ranks name the third, which is lost or does something else, before training and in it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from typing import Any

import keras
import pytest
import tensorflow as tf

import tf_ooo
from tests import forked, launches
from tests.distributed import training as t
from tf_ooo.hosts.ranks import launch, rendezvous, roll
from tf_ooo.hosts.ranks.line import Attention
from tf_ooo.modes import data_parallel

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = pytest.mark.takes(90)
on_each_engine = pytest.mark.parametrize("engine", ["horovod", "collectives"])

# Waiting for the end of a rank fails after so many seconds, which it would without the others' notice.
END_S = 90.0
# Ranks wait so long for the others to begin, instead of 45 s.
PATIENCE_S = 12
PATIENCE = {name: str(PATIENCE_S) for name in ("HOROVOD_GLOO_TIMEOUT_SECONDS", "TF_OOO_START_TIMEOUT_S")}


def lose(how: str) -> None:
    """This process ends so."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("there is no such file")


def fit(callbacks: list[Any], rank: int = 0, epochs: int = 2) -> None:
    t.fit(t.compiled(t.mlp(), "sgd"), t.data(rank, 80), callbacks, epochs=epochs)


def train_and_lose(how: str, when: str) -> None:
    engine = data_parallel.connect()
    if engine.rank == 1 and when == "before":
        lose(how)

    def on_train_batch_begin(batch: int, logs: Any) -> None:
        if (engine.rank, batch) == (1, 5):
            lose(how)

    fit([tf_ooo.OOOBackprop(mode="data_parallel"),
         keras.callbacks.LambdaCallback(on_train_batch_begin=on_train_batch_begin)], engine.rank)  # fmt: skip


def errors(processes: list[forked.Forked], lost: int = 1) -> list[str]:
    """The one line that each of the others ends with."""
    said = [process.communicate(timeout=END_S)[0] for place, process in enumerate(processes) if place != lost]
    lines = [re.findall(r"^(?:\S*\.)?BackendError: (.*)$", text, re.MULTILINE)[-1:] for text in said]
    assert all(lines), "\n".join(said)
    return [line for (line,) in lines]


@on_each_engine
@pytest.mark.parametrize("when", ["before", "in"])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_rank_that_ended_is_named_by_the_others(engine, how, when):
    with launches.training_together(engine, 3, train_and_lose, how, when) as processes:
        lines = errors(processes)
        pid = processes[1].pid
    why = "ended without a word, as where it is killed"
    if how == "raises" and when == "in":
        why = "ended: ValueError: there is no such file"
    for rank, line in zip((0, 2), lines, strict=True):
        where = "before training" if when == "before" else "in execution 6"
        assert line.startswith(
            f"rank {rank} of 3 stopped {where}: another worker ended: rank 1 (process {pid} on "
        )
        assert why in line


@on_each_engine
def test_rank_0_is_named_too(engine):
    """All others hear of each other through it."""
    with launches.training_together(engine, 3, train_and_lose_rank_0) as processes:
        lines = errors(processes, lost=0)
    assert all("another worker ended: rank 0 (process" in line for line in lines), lines


def train_and_lose_rank_0() -> None:
    engine = data_parallel.connect()
    if engine.rank == 0:
        fit([keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: lose("killed"))])
    fit([tf_ooo.OOOBackprop(mode="data_parallel")], engine.rank)


def evaluate_and_lose() -> None:
    engine = data_parallel.connect()
    model = t.compiled(t.mlp(), "sgd")
    if engine.rank == 1:
        lose("killed")
    model.evaluate(*t.data(engine.rank, 80), verbose=0, callbacks=[tf_ooo.OOOBackprop(mode="data_parallel")])


@on_each_engine
def test_a_rank_lost_in_an_evaluation_is_named(engine):
    with launches.training_together(engine, 3, evaluate_and_lose) as processes:
        lines = errors(processes)
        pid = processes[1].pid
    assert all(
        f"stopped at the end of an evaluation: another worker ended: rank 1 (process {pid} on " in line
        for line in lines
    )


# -- a rank without the callback ------------------------------------------------------------------------


def rank_1_without_callback(how: str) -> None:
    """``how`` it trains alone: it has joined, has begun Horovod, or has done nothing."""
    rank = int(os.environ.get("HOROVOD_RANK") or data_parallel.connect().rank)
    if how == "joined":
        data_parallel.connect()
    if how == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
    alone = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(0.2))
    if rank == 1:
        fit([alone], epochs=1000)
    fit([tf_ooo.OOOBackprop(mode="data_parallel")], rank)


@pytest.mark.parametrize(
    ("engine", "how"),
    [("horovod", "joined"), ("collectives", "joined"), ("horovod", "horovod"), ("horovod", "nothing")],
)
def test_a_rank_without_the_callback_is_named(engine, how):
    with launches.training_together(engine, 3, rank_1_without_callback, how, more=PATIENCE) as processes:
        lines = errors(processes)
    if how == "joined":
        told = "stopped before training: rank 1 (process"
        assert all("trains in a fit without OOOBackprop: give all ranks the same" in line for line in lines)
    else:
        variable = "TF_OOO_START_TIMEOUT_S" if how == "horovod" else "HOROVOD_GLOO_TIMEOUT_SECONDS"
        told = f"rank 1 did not come within {PATIENCE_S} s ({variable})"
        assert all("trains without OOOBackprop" in line for line in lines)
    assert all(told in line for line in lines), lines


def join_after(seconds_s: float) -> None:
    """Rank 1 reads data for so long."""
    engine = data_parallel.connect()
    if engine.rank == 1:
        time.sleep(seconds_s)
    with t.warnings_of_tf_ooo() as lines:
        fit([tf_ooo.OOOBackprop(mode="data_parallel")], engine.rank)
    print(f"rank {engine.rank} trained; told {lines}", flush=True)


def test_a_rank_that_is_late_is_waited_for():
    with launches.training_together(
        "collectives", 3, join_after, 12.0, more={"TF_OOO_START_TIMEOUT_S": "4"}
    ) as processes:
        said = [process.communicate(timeout=END_S)[0] for process in processes]
    assert all("trained; told" in text for text in said), said
    assert all("rank 1 (process" in said[rank] for rank in (0, 2)), said
    assert all(
        text.count("has not come to this fit for 4 s") == (rank != 1) for rank, text in enumerate(said)
    )


def begin_late(seconds_s: float) -> None:
    """Horovod has begun on all; rank 1 reads data for so long."""
    import horovod.tensorflow as hvd

    rendezvous.START_S = 4.0
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(seconds_s)
    with t.warnings_of_tf_ooo() as lines:
        fit([tf_ooo.OOOBackprop(mode="data_parallel")], hvd.rank())
    print(f"rank {hvd.rank()} trained; told {lines}", flush=True)


def test_a_rank_that_reads_data_after_hvd_init_is_waited_for():
    """Longer than Horovod's own limit, which holds for its beginning alone."""
    more = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "15"}
    with launches.training_together("horovod", 3, begin_late, 18.0, more=more) as processes:
        said = [process.communicate(timeout=END_S)[0] for process in processes]
    assert all("trained; told" in text for text in said), said
    assert "rank 1 has not come to this fit for 4 s" in said[0]
    assert "waited for up to 600 s (TF_OOO_START_TIMEOUT_S)" in said[0]


# -- ranks that are stopped -------------------------------------------------------------------------------

SHORT_SILENCE_S = 5.0


def stop_before_the_first_fit(victim: int) -> None:
    Attention.SILENCE_S = SHORT_SILENCE_S
    engine = data_parallel.connect()
    if engine.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    fit([tf_ooo.OOOBackprop(mode="data_parallel")], engine.rank)


@on_each_engine
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_before_training_is_named(engine, victim):
    with launches.training_together(engine, 3, stop_before_the_first_fit, victim) as processes:
        lines = errors(processes, lost=victim)
        pid = processes[victim].pid
    told = f"stopped before training: another worker is silent: rank {victim} (process {pid} on "
    assert all(told in line and "has said nothing for 5 s: it is stopped" in line for line in lines), lines


def hold_pythons_lock(seconds: int) -> None:
    """Hold Python's lock as a library does in which rank 1 reads data; rank 0 pauses meanwhile."""
    Attention.SILENCE_S = SHORT_SILENCE_S
    engine = data_parallel.connect()
    if engine.rank == 1:
        ctypes.PyDLL(None).sleep(seconds)
    fit([tf_ooo.OOOBackprop(mode="data_parallel")], engine.rank)
    print("trained", flush=True)


def test_a_rank_that_holds_pythons_lock_is_waited_for():
    """And one that itself is stopped for a while takes nobody for silent."""
    with launches.training_together("horovod", 2, hold_pythons_lock, 12) as processes:
        time.sleep(5)
        processes[0].send_signal(signal.SIGSTOP)
        time.sleep(2 * SHORT_SILENCE_S)
        processes[0].send_signal(signal.SIGCONT)
        said = [process.communicate(timeout=END_S)[0] for process in processes]
    assert all("trained" in text for text in said), said


def lose_in_the_beginning(how: int) -> None:
    """In ``hvd.init()``, or while TensorFlow sets the cluster up."""
    Attention.SILENCE_S = SHORT_SILENCE_S
    if os.environ.get("HOROVOD_RANK") == "1":
        import horovod.tensorflow as hvd

        hvd.init = lambda: os.kill(os.getpid(), how)
    elif "HOROVOD_RANK" not in os.environ and launch.place_in_tf_config()[0] == 1:
        tf.distribute.MultiWorkerMirroredStrategy = lambda: os.kill(os.getpid(), how)
    data_parallel.connect()
    fit([tf_ooo.OOOBackprop(mode="data_parallel")])


@on_each_engine
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_a_library_begins_is_named(engine, how):
    with launches.training_together(engine, 3, lose_in_the_beginning, int(how)) as processes:
        lines = errors(processes)
        statuses = [processes[rank].returncode for rank in (0, 2)]
        pid = processes[1].pid
    does = "is silent" if how == signal.SIGSTOP else "ended"
    told = f"stopped before training: another worker {does}: rank 1 (process {pid} on "
    assert told in lines[0], lines
    # Rank 2 hears of it as TensorFlow lets go of Python's lock, when rank 0 has ended.
    told = told if engine == "horovod" else f"another worker ended: rank 1 (process {pid} on "
    assert told in lines[1], lines
    assert statuses == [1, 1]


def abort_in_the_beginning(lost: bool) -> None:
    """Abort at once, as Gloo does in its own thread where another rank is lost; or for another reason."""
    import horovod.tensorflow as hvd

    def abort_or_die() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL) if lost else time.sleep(2)
        time.sleep(0.5)
        os.abort()

    hvd.init = abort_or_die
    fit([tf_ooo.OOOBackprop(mode="data_parallel")])


def test_a_library_that_aborts_in_the_beginning_is_explained():
    with launches.training_together("horovod", 2, abort_in_the_beginning, True) as processes:
        (line,) = errors(processes)
        assert processes[0].returncode == 1
        told = f"stopped before training: another worker ended: rank 1 (process {processes[1].pid} on "
    assert told in line


def test_a_library_that_aborts_for_another_reason_does():
    with launches.training_together("horovod", 2, abort_in_the_beginning, False) as processes:
        processes[0].communicate(timeout=END_S)
        assert processes[0].returncode == -signal.SIGABRT


def leave_a_fit_and_live(seconds_s: float) -> None:
    """Rank 1 ends its fit by an error, which its script handles."""
    engine = data_parallel.connect()

    def on_train_batch_begin(batch: int, logs: Any) -> None:
        if (engine.rank, batch) == (1, 5):
            lose("raises")

    raising = keras.callbacks.LambdaCallback(on_train_batch_begin=on_train_batch_begin)
    try:
        fit([tf_ooo.OOOBackprop(mode="data_parallel"), raising], engine.rank)
    except ValueError:
        time.sleep(seconds_s)


@on_each_engine
def test_a_rank_that_has_left_and_lives_keeps_nobody_waiting(engine):
    with launches.training_together(engine, 3, leave_a_fit_and_live, 2 * END_S) as processes:
        for rank in (0, 2):
            said = processes[rank].communicate(timeout=END_S)[0]
            assert "in execution 6: another worker ended: rank 1 (process" in said, said
            assert "ValueError: there is no such file" in said
        assert processes[1].poll() is None
        processes[1].kill()


def go_on_after_a_fit(seconds_s: float) -> None:
    """Rank 1 has ended; the others have something to do, for which they ask Horovod who they are."""
    engine = data_parallel.connect()
    fit([tf_ooo.OOOBackprop(mode="data_parallel")], engine.rank)
    if engine.rank != 1:
        time.sleep(seconds_s)
        import horovod.tensorflow as hvd

        print(f"still rank {hvd.rank()}", flush=True)


def test_who_has_trained_may_end_before_the_others():
    with launches.training_together("horovod", 3, go_on_after_a_fit, 8.0) as processes:
        said = [process.communicate(timeout=END_S)[0] for process in processes]
    assert [f"still rank {rank}" in text for rank, text in enumerate(said)] == [True, False, True], said


# -- ranks that do not go together ------------------------------------------------------------------------


def join_with_another_version() -> None:
    if os.environ["HOROVOD_RANK"] == "2":
        roll.Member.__init__.__defaults__ = (*roll.Member.__init__.__defaults__[:-1], "0.0.7")
    data_parallel.connect()


def test_another_version_of_tf_ooo_is_refused_by_name():
    with launches.training_together("horovod", 3, join_with_another_version) as processes:
        lines = errors(processes, lost=2)
        pid = processes[2].pid
    assert all(f"rank 2 (process {pid} on " in line for line in lines)
    assert all(
        f"runs tf_ooo 0.0.7, rank 0 runs {tf_ooo.__version__}: install the same" in line for line in lines
    )


def join_alone() -> None:
    data_parallel.connect()


def test_a_port_of_rank_0_that_is_taken_is_named():
    import json
    import socket

    (first, *rest) = launches.collective_variables(2)
    address = json.loads(first["TF_CONFIG"])["cluster"]["worker"][0]
    host, port = address.split(":")
    with socket.create_server((host, int(port))):
        said = forked.start(join_alone, environment=first).communicate(timeout=END_S)[0]
    assert f"BackendError: rank 0 cannot listen at {address}: Address already in use" in said
    assert rest
