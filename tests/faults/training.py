"""Trains in a process: goes on from the newest checkpoint, is struck, writes down its end."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.faults.setups import EPOCHS, MODES, ROWS, STEPS, VARIANTS, Fault, Point, Training
from tests.processes import make_devices
from tests.same_bits import bits_of

WIDTHS = (33, 41, 17)
# Beside the folder that is saved to, in the folder of a run.
DISK, STRUCK, FILLER = "disk", "struck", ".filler"


@dataclass(frozen=True)
class Ended:
    """Says how a training that ran to its end has ended; ``unreadable`` are files and why."""

    bits: int
    history: dict[str, list[float]]
    first_epoch: int
    unreadable: tuple[str, ...]


@dataclass(frozen=True)
class Order:
    """Says what a process is to do.

    Attributes:
        folder: of the run; ``DISK`` in it is saved to.
        rank: of this process.
        cluster: addresses, empty without workers.
        fault: strikes this process, or another by it.
        victim: the process that is struck; None: this one.
    """

    training: Training
    folder: Path
    rank: int = 0
    cluster: str = ""
    fault: Fault | None = None
    victim: int | None = None

    @property
    def disk(self) -> Path:
        return self.folder / DISK


class _Calls:
    """Strikes at a call of a number."""

    def __init__(self, order: Order) -> None:
        fault = order.fault
        self._order = order
        self._point = fault.when if fault is not None and isinstance(fault.when, Point) else None
        self._count = 0

    def waits_for(self, where: str) -> bool:
        return self._point is not None and self._point.where == where

    def __call__(self, where: str) -> None:
        if self._point is None or self._point.where != where:
            return
        self._count += 1
        if self._count == self._point.number:
            strike(self._order)


_saved: list[Callable[[str], None]] = []


@keras.saving.register_keras_serializable("faults")
class Last(keras.layers.Dense):
    """Tells when its weights are saved, in the middle of a checkpoint."""

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        for told in _saved:
            told("saving")


class _Telling(keras.callbacks.Callback):
    """Tells of the calls of one method, and has no other."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        for what in ("train_batch_begin", "train_batch_end", "epoch_begin", "epoch_end", "train_end"):
            if calls.waits_for(what):
                setattr(self, f"on_{what}", lambda *arguments, what=what, **named: calls(what))


class _Batches(keras.utils.PyDataset):
    def __init__(self, calls: _Calls, rank: int) -> None:
        super().__init__()
        self._calls, self._data = calls, _data(rank)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self._calls("data")
        x, y = self._data
        rows = slice(index * ROWS, (index + 1) * ROWS)
        return x[rows], y[rows]


def _data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    x = random.normal(size=(STEPS * ROWS, 7)).astype("float32")
    return x, random.normal(size=(STEPS * ROWS, 3)).astype("float32")


def _given_to_fit(kind: str, calls: _Calls, rank: int) -> dict[str, Any]:
    """The arguments of ``fit`` that are the data."""
    if kind == "arrays":
        x, y = _data(rank)
        return {"x": x, "y": y, "batch_size": ROWS}
    batches = _Batches(calls, rank)
    if kind == "sequence":
        return {"x": batches}
    import tensorflow as tf

    def generated() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for index in range(STEPS):
            yield batches[index]

    signature = (tf.TensorSpec((ROWS, 7), tf.float32), tf.TensorSpec((ROWS, 3), tf.float32))
    dataset = tf.data.Dataset.from_generator(generated, output_signature=signature)
    return {"x": dataset.apply(tf.data.experimental.assert_cardinality(STEPS))}


def _new_model(training: Training) -> keras.Model:
    keras.utils.set_random_seed(7)
    hidden = [keras.layers.Dense(width, "tanh") for width in WIDTHS]
    model = keras.Sequential([keras.Input((7,)), *hidden, Last(3)])
    kind = VARIANTS[training.variant][0]
    optimizer = keras.optimizers.Adam(0.01) if kind == "adam" else keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=MODES[training.mode].compiles)
    return model


def _with_weights(training: Training, path: Path) -> keras.Model:
    model = _new_model(training)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


def newest(training: Training, disk: Path) -> tuple[keras.Model | None, list[str]]:
    """The model of the newest checkpoint, None without one; and what has its name but cannot be read."""
    models: list[keras.Model] = []
    unreadable: list[str] = []
    for path in sorted(disk.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(disk).parts) or not path.is_file():
            continue
        try:
            if path.suffix == ".keras":
                models.append(keras.models.load_model(path))
            elif path.suffix == ".h5":
                models.append(_with_weights(training, path))
        except Exception as error:
            unreadable.append(f"{path.relative_to(disk)}: {type(error).__name__}: {error}")
    return max(models, key=lambda model: int(model.optimizer.iterations), default=None), unreadable


def _saving_callback(kind: str, disk: Path) -> keras.callbacks.Callback:
    if kind.endswith("backup") or kind.endswith("backups"):
        return keras.callbacks.BackupAndRestore(
            disk / "backup", double_checkpoint=kind == "two_backups", delete_checkpoint=False
        )
    name = {"models": "{epoch}.keras", "model": "model.keras", "weights": "{epoch}.weights.h5"}[kind]
    return keras.callbacks.ModelCheckpoint(disk / name, save_weights_only=kind == "weights")


def strike(order: Order) -> None:
    """Does what the fault is, here and now."""
    fault = order.fault
    assert fault is not None
    tell_struck(order.folder)
    if fault.kind == "exception":
        raise RuntimeError("the planted exception")
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "full_disk":
        fill(order.disk, fault.free_bytes)
    elif fault.kind == "file_limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.free_bytes, resource.RLIM_INFINITY))
    else:
        os.kill(order.victim or os.getpid(), SIGNALS[fault.kind])


SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
}


def tell_struck(folder: Path) -> None:
    (folder / STRUCK).write_text(repr(time.time()))


def fill(disk: Path, free_bytes: int) -> None:
    """Leaves so many bytes on a disk, or less; does nothing on one that holds less already."""
    with (disk / FILLER).open("ab", buffering=0) as filler:
        state = os.statvfs(disk)
        size = state.f_bavail * state.f_frsize - free_bytes
        if size > 0:
            os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, size)


def train(order: Order) -> None:
    """Trains to the end, and writes down how that was."""
    said = os.open(order.folder / f"said{order.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1), os.dup2(said, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    training, mode = order.training, MODES[order.training.mode]
    make_devices(mode.devices)
    if mode.ranks > 1:
        from tf_ooo.modes import data_parallel

        data_parallel.connect()
    import tf_ooo

    calls = _Calls(order)
    _saved.append(calls)
    kind, validates = VARIANTS[training.variant][1:]
    in_fit = training.saving.endswith(("backup", "backups"))
    model, unreadable = (None, []) if in_fit else newest(training, order.disk)
    first_epoch = 0 if model is None else int(model.optimizer.iterations) // STEPS
    saving = [_saving_callback(training.saving, order.disk)] if order.rank == 0 else []
    ours = tf_ooo.OOOBackprop(**dict(mode.options), **_placed(order))
    callbacks = [*(saving if in_fit else []), _Telling(calls), ours, *([] if in_fit else saving)]
    model = _new_model(training) if model is None else model
    settings = {"epochs": EPOCHS, "initial_epoch": first_epoch, "shuffle": False, "verbose": 0}
    data = _given_to_fit(kind, calls, order.rank)
    validation = {"validation_data": _data(9), "validation_batch_size": ROWS} if validates else {}
    try:
        history = model.fit(**data, **validation, **settings, callbacks=callbacks)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if ours.report.fell_back and mode.ranks == 1:
        print("not rewritten:", ours.report.fallback_reason, file=sys.stderr)
    if mode.rounds:
        print("compiled:", ours.report.compiled_tasks, ours.report.notes, file=sys.stderr)
    in_the_end = [] if order.fault is None else newest(training, order.disk)[1]
    ended = Ended(bits_of(model), history.history, first_epoch, (*unreadable, *in_the_end))
    unfinished = order.folder / f"unfinished{order.rank}"
    unfinished.write_bytes(pickle.dumps(ended))
    unfinished.rename(order.folder / f"ended{order.rank}")


def _placed(order: Order) -> dict[str, Any]:
    """Costs, so that the plan is the same whatever is measured, and the workers."""
    if dict(MODES[order.training.mode].options).get("mode") not in ("pipeline", "layerpipe"):
        return {}
    from tf_ooo.costs.layer_costs import LayerCosts, Link
    from tf_ooo.costs.table import CostTable

    costs = CostTable([LayerCosts(1.0, 1.0, 1.0) for _ in range(len(WIDTHS) + 1)], Link(1e-3, 1e9))
    return {"costs": costs} | ({"devices": order.cluster} if order.cluster else {})
