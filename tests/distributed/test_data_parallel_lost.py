"""Ranks that are killed, that have fewer data than they said, that stop alone: the others say so and end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import pytest

import tf_ooo
from tests import forked, launches
from tests.distributed import training as t
from tf_ooo.modes import data_parallel
from tf_ooo.modes.data_parallel import ranks

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = pytest.mark.takes(40)

# Waiting for the end of a rank fails after so many seconds, which it would without the others' notice.
END_S = 60.0


class Waits(keras.callbacks.Callback):
    """In the third epoch, to be killed."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (2, 3):
            print("waits", flush=True)
            time.sleep(600)


def _train_with_backups(folder: Path, waits: bool) -> None:
    """Five epochs on two ranks, of which rank 0 keeps backups and in the end the weights."""
    engine = data_parallel.connect()
    model = t.compiled(t.with_batch_norm(), t.momentum(), rank=engine.rank)
    started: list[int] = []
    ours = tf_ooo.OOOBackprop(mode="data_parallel")
    callbacks = [
        *([keras.callbacks.BackupAndRestore(str(folder / "backup"))] if engine.rank == 0 else []),
        ours,
        *([Waits()] if waits and engine.rank == 1 else []),
        keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: started.append(epoch)),
    ]
    t.fit(model, t.data(engine.rank, 80), callbacks, epochs=5)
    t.assert_not_reordered(ours.report)
    print(f"rank {engine.rank} trained epochs {started}", flush=True)
    if engine.rank == 0:
        (folder / "weights").write_bytes(b"".join(w.numpy().tobytes() for w in model.trainable_weights))


def _train_with_half_of_the_data_on_rank_1() -> None:
    ranks._PATIENCE_S = 3.0
    engine = data_parallel.connect()
    model = t.compiled(t.with_batch_norm(), t.momentum())
    options = {"lockstep": "epoch"}
    t.ours(
        model, t.data(engine.rank, 40 if engine.rank else 80), options=options, epochs=2, steps_per_epoch=10
    )


def _train_with_a_stop_on_rank_1() -> None:
    ranks._PATIENCE_S = 3.0
    options = {"lockstep": "epoch", "stop_timeout_s": 2.0}
    engine = data_parallel.connect()
    model = t.compiled(t.with_batch_norm(), t.momentum())
    t.ours(
        model, t.data(engine.rank, 80), [t.CountSteps(stop_at=4)] if engine.rank else [], options, epochs=2
    )


def _train_with_an_error_on_rank_1_whose_process_stays() -> None:
    """Its heartbeats go on."""

    def fail(epoch: int, logs: Any = None) -> None:
        raise RuntimeError("no such file")

    engine = data_parallel.connect()
    model = t.compiled(t.with_batch_norm(), t.momentum())
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=fail)] if engine.rank else []
    with contextlib.suppress(RuntimeError) if engine.rank else contextlib.nullcontext():
        t.fit(
            model, t.data(engine.rank, 80), [tf_ooo.OOOBackprop(mode="data_parallel"), *callbacks], epochs=3
        )
    sys.stdin.read()


def _ended(engine: str, function: Any, *arguments: Any) -> list[str]:
    """Return what each has said when both have ended, which they do in time."""
    with launches.training_together(engine, 2, function, *arguments) as processes:
        return [process.communicate(timeout=END_S + 60)[0] for process in processes]


def _kill_rank_1_of(processes: list[forked.Forked]) -> str:
    """By its pid, once it waits; what rank 0 says until it ends, which must be soon."""
    said: list[str] = []
    while "waits" not in said:
        line = processes[1].stdout.readline()
        assert line, "\n".join(said)
        said.append(line.strip())
    os.kill(processes[1].pid, signal.SIGKILL)
    return processes[0].communicate(timeout=END_S)[0]


@pytest.mark.parametrize("engine", ["horovod", "collectives"])
def test_killed_worker_ends_the_others_and_training_continues_from_the_backup(engine, tmp_path):
    with launches.training_together(engine, 2, _train_with_backups, tmp_path, True) as processes:
        said = _kill_rank_1_of(processes)
        assert processes[0].returncode == 1
    told = "BackendError: rank 0 of 2 stopped in execution 24: another worker ended: rank 1 (process"
    assert f"{told} {processes[1].pid} on " in said, said
    assert not (tmp_path / "weights").exists()
    again = _ended(engine, _train_with_backups, tmp_path, False)
    assert all("trained epochs [2, 3, 4]" in output for output in again), again
    never_killed = tmp_path / "never"
    never_killed.mkdir()
    _ended(engine, _train_with_backups, never_killed, False)
    assert (tmp_path / "weights").read_bytes() == (never_killed / "weights").read_bytes()


def test_a_rank_whose_data_end_early_says_so_and_ends_the_others():
    """The others wait for its gradients."""
    said = _ended("horovod", _train_with_half_of_the_data_on_rank_1)
    assert "BackendError: rank 0 of 2 stopped in execution 6: another worker ended: rank 1 (" in said[0]
    assert "rank 1's data ended 5 batches before the end of the epoch" in said[1], said[1]


def test_a_rank_that_stops_alone_says_so_and_ends_the_others():
    said = _ended("horovod", _train_with_a_stop_on_rank_1)
    assert "BackendError: rank 0 of 2 stopped in execution 5: another worker ended: rank 1 (" in said[0]
    told = "rank 1 stopped training 6 steps before the end of the epoch, and the others do not answer"
    assert f"BackendError: {told}" in said[1], said[1]


def test_a_rank_that_leaves_a_fit_ends_it_for_the_others_while_its_process_lives():
    function = _train_with_an_error_on_rank_1_whose_process_stays
    with launches.training_together("collectives", 2, function) as processes:
        said = processes[0].communicate(timeout=END_S + 60)[0]
        assert processes[1].poll() is None
    assert "BackendError: rank 0 of 2 stopped" in said, said
    assert f"another worker ended: rank 1 (process {processes[1].pid} on" in said, said
    assert "RuntimeError: no such file" in said, said
