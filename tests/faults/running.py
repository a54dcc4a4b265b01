"""Runs a set-up: the fault strikes a training, which has to end in time and to go on to the same bits."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import pickle
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from tests import forked, launches
from tests.distributed.clusters import addresses, start_worker, wait_until_ready
from tests.faults import training as process
from tests.faults.setups import ALL, FIRST, MODES, SECOND, WORKER, Fault, Point, Setup, Training
from tests.faults.training import DISK, SIGNALS, STRUCK, Ended, Order
from tests.harness.children import Outcome

# After a fault everything that it did not stop for ever has to end, or to be done, within so many seconds.
LIMIT_S = 60.0
# A training without a fault, on a busy machine.
PLAIN_LIMIT_S = 240.0
WORKER_ENDS_S = 10.0
DISK_BYTES = 1_000_000
GOES_ON = ("pause", "slow")
# HDF5 ends with a segmentation fault, after all else, where it could not write a file to its end: with stock
# Keras, too (h5py 3.14).
NO_SPACE = ("full_disk", "file_limit")
_PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """``args`` are those of an :class:`Outcome`.

    Its kind is ``"hangs"``, ``"crashes"``, ``"left behind"``, ``"unreadable"``, ``"does not go on"``,
    ``"other bits"``, ``"no reference"``, or ``"no small disk"``.
    """


@dataclass
class Processes:
    """Holds the processes of one training: the ranks by number, and workers, which outlive them."""

    folder: Path
    training: Training
    cluster: str = ""
    workers: dict[str, forked.Forked] = field(default_factory=dict)

    def start_workers(self) -> None:
        """Start the workers that are not there."""
        count = MODES[self.training.mode].workers
        self.cluster = self.cluster or (addresses(count + 1) if count else "")
        for task in range(1, count + 1):
            name = f"worker {task}"
            if name not in self.workers or self.workers[name].poll() is not None:
                self.workers[name] = start_worker(self.cluster, task)
                wait_until_ready(self.workers[name])

    def end_workers(self) -> None:
        """End the workers as a user does; a stopped one goes on, to its end. Failed: one does not end."""
        for name, worker in self.workers.items():
            worker.terminate()
            worker.send_signal(signal.SIGCONT)
            try:
                worker.wait(WORKER_ENDS_S)
            except subprocess.TimeoutExpired:
                raise Failed(
                    "left behind", f"{name} does not end {WORKER_ENDS_S:g} s after SIGTERM"
                ) from None

    def kill_workers(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.communicate()

    @contextlib.contextmanager
    def started(self, fault: Fault | None = None) -> Iterator[dict[str, forked.Forked]]:
        """The ranks by name; none is left."""
        mode = MODES[self.training.mode]
        launcher = launches.environments(mode.engine, mode.ranks) if mode.engine else None
        ranks: dict[str, forked.Forked] = {}
        with launcher or contextlib.nullcontext([launches.without_launcher()]) as environments:
            try:
                for rank, environment in enumerate(environments):
                    order = self._order(rank, fault)
                    ranks[f"rank {rank}"] = forked.start(_train_as_script, order, environment=environment)
                yield ranks
            finally:
                for started in ranks.values():
                    started.kill()
                    started.communicate()

    def _order(self, rank: int, fault: Fault | None) -> Order:
        order = Order(self.training, self.folder, rank, self.cluster)
        if fault is None or not isinstance(fault.when, Point):
            return order
        performs = SECOND if fault.target == SECOND else FIRST
        if f"rank {rank}" != performs:
            return order
        victim = self.workers[fault.target].pid if fault.target in self.workers else None
        return Order(self.training, self.folder, rank, self.cluster, fault, victim)

    def ended(self) -> list[Ended] | None:
        """Return what each rank has written; None: some have not come to their end."""
        files = [self.folder / f"ended{rank}" for rank in range(MODES[self.training.mode].ranks)]
        if not all(file.exists() for file in files):
            return None
        return [pickle.loads(file.read_bytes()) for file in files]

    def said(self) -> str:
        texts = [(path.name, path.read_text(errors="replace")) for path in sorted(self.folder.glob("said*"))]
        return "\n".join(f"--- {name}:\n{text[-9000:]}" for name, text in texts if text)


def _train_as_script(order: Order) -> None:
    forked.end_with_parent()
    forked.as_script(process.train, order)


@dataclass(frozen=True)
class Reference:
    """A training without a fault."""

    ended: list[Ended]
    duration_s: float


def reference_of(training: Training, folder: Path) -> Reference:
    """Trained once for all trainings of the name, by whoever comes first."""
    file = folder / training.name
    with (folder / f"{training.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with own_folder() as own:
                file.write_bytes(pickle.dumps(_undisturbed(training, own)))
        reference: Reference = pickle.loads(file.read_bytes())
        return reference


def _undisturbed(training: Training, folder: Path) -> Reference:
    (folder / DISK).mkdir()
    processes = Processes(folder, training)
    try:
        processes.start_workers()
        began = time.time()
        with processes.started() as ranks:
            _wait_for(ranks, began + PLAIN_LIMIT_S)
        ended = processes.ended()
        said = processes.said()
        if ended is None or "not rewritten" in said:
            raise Failed("no reference", said)
        return Reference(ended, (folder / "ended0").stat().st_mtime - began)
    finally:
        processes.kill_workers()


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a folder as tempfile.TemporaryDirectory, which a forked process would remove at its end."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(setup: Setup, references: Path) -> Outcome:
    """Runs it, in processes that are forked from this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with own_folder() as folder, contextlib.ExitStack() as stack:
        try:
            reference = reference_of(setup.training, references)
            (folder / DISK).mkdir()
            if setup.fault.kind == "full_disk":
                stack.enter_context(_small_disk(folder / DISK))
            return _Run(setup, folder, reference).outcome()
        except Failed as failed:
            return Outcome(*failed.args)
        except Exception:  # such as of a worker that does not start
            return Outcome("broken", traceback.format_exc())


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A file system in memory, which takes root to mount."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise Failed("no small disk", "mounting a tmpfs takes root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class _Run:
    """The run of one set-up in its folder."""

    def __init__(self, setup: Setup, folder: Path, reference: Reference) -> None:
        self.setup, self.fault, self.reference = setup, setup.fault, reference
        self.processes = Processes(folder, setup.training)
        self.folder = folder

    def outcome(self) -> Outcome:
        try:
            self.processes.start_workers()
            outcome = self._struck()
            if self.processes.ended() is None:
                self._resume()
            self.processes.end_workers()
        finally:
            self.processes.kill_workers()
        left = psutil.Process().children(recursive=True)
        if left:
            names = [f"{child.pid} {child.status()}" for child in left]
            for child in left:
                child.kill()
            raise Failed("left behind", ", ".join(names))
        return outcome

    def _struck(self) -> Outcome:
        """The training that the fault strikes; it has ended, and its bits are right if it went on."""
        began = time.time()
        with self.processes.started(self.fault) as ranks:
            self._strike_in_time(ranks, began)
            struck = self._struck_at()
            limit = (struck or began) + LIMIT_S + (self.fault.seconds if struck else PLAIN_LIMIT_S)
            if self.fault.kind in GOES_ON:
                limit += self.reference.duration_s
            self._continue(ranks, struck)
            kept = (self.fault.target,) if self.fault.kind == "stop" and struck else ()
            awaited = {name: rank for name, rank in ranks.items() if name not in kept}
            _wait_for(awaited, limit, self.processes)
            text = f"ended {time.time() - (struck or time.time()):.1f} s after the fault"
            self._refuse_crashes(awaited)
        if (ended := self.processes.ended()) is not None:
            self._compare(ended)
        kind = "not struck" if struck is None else "good" if ended is None else "went on"
        return Outcome(kind, f"{text}\n{self.processes.said()}")

    def _struck_at(self) -> float | None:
        file = self.folder / STRUCK
        with contextlib.suppress(FileNotFoundError, ValueError):
            return float(file.read_text())
        return None

    def _strike_in_time(self, ranks: dict[str, forked.Forked], began: float) -> None:
        """Returns when the fault has struck, or nobody is left to be struck."""
        when = self.fault.when
        end = began + PLAIN_LIMIT_S
        if not isinstance(when, Point):
            end = began + when * self.reference.duration_s
        while self._struck_at() is None and time.time() < end:
            if all(rank.poll() is not None for rank in ranks.values()):
                return
            time.sleep(0.01)
        if isinstance(when, Point):
            return
        process.tell_struck(self.folder)
        if self.fault.kind == "full_disk":
            process.fill(self.folder / DISK, self.fault.free_bytes)
            return
        everybody = {**ranks, **self.processes.workers}
        for name, victim in everybody.items():
            if self.fault.target in (name, ALL):
                victim.send_signal(SIGNALS[self.fault.kind])

    def _continue(self, ranks: dict[str, forked.Forked], struck: float | None) -> None:
        if self.fault.kind != "pause" or struck is None:
            return
        time.sleep(self.fault.seconds)
        {**ranks, **self.processes.workers}[self.fault.target].send_signal(signal.SIGCONT)

    def _refuse_crashes(self, ranks: dict[str, forked.Forked]) -> None:
        """Nobody ends by a signal but who was sent one."""
        for name, rank in ranks.items():
            code = -(rank.returncode or 0)
            sent = self.fault.target in (name, ALL) and code == SIGNALS.get(self.fault.kind, 0)
            hdf5 = self.fault.kind in NO_SPACE and code == signal.SIGSEGV and "h5py" in self.processes.said()
            if code > 0 and not sent and not hdf5:
                raise Failed(
                    "crashes", f"{name} ended with {signal.Signals(code).name}\n{self.processes.said()}"
                )

    def _resume(self) -> None:
        """Without a fault, on a disk with space; to the same bits."""
        (self.folder / DISK / process.FILLER).unlink(missing_ok=True)
        for path in (*self.folder.glob("ended*"), *self.folder.glob("said*")):
            path.unlink()
        if self.processes.workers:
            alive = self.fault.target != WORKER or self.fault.kind in GOES_ON
            if not (self.setup.same_workers and alive):
                self.processes.kill_workers()
        self.processes.start_workers()
        with self.processes.started() as ranks:
            _wait_for(ranks, time.time() + PLAIN_LIMIT_S, self.processes)
        ended = self.processes.ended()
        if ended is None:
            raise Failed("does not go on", self.processes.said())
        self._compare(ended)

    def _compare(self, ended: list[Ended]) -> None:
        for rank, (mine, wanted) in enumerate(zip(ended, self.reference.ended, strict=True)):
            if mine.unreadable:
                raise Failed("unreadable", "\n".join(mine.unreadable) + "\n" + self.processes.said())
            tails = {
                name: values[len(values) - len(mine.history.get(name, values)) :]
                for name, values in wanted.history.items()
            }
            if not self._are_same(mine, wanted.bits, tails):
                raise Failed(
                    "other bits", f"rank {rank}: {mine} instead of {wanted}\n{self.processes.said()}"
                )

    def _are_same(self, mine: Ended, bits: int, history: dict[str, list[float]]) -> bool:
        """The bits and the history, or the history up to rounding."""
        if not MODES[self.setup.training.mode].rounds:
            return mine.bits == bits and mine.history in ({}, history)
        return mine.history.keys() in (set(), history.keys()) and all(
            np.allclose(values, history[name], rtol=1e-4, atol=1e-6) for name, values in mine.history.items()
        )


def _wait_for(ranks: dict[str, forked.Forked], end: float, processes: Processes | None = None) -> None:
    """Failed: some do not end by then; says where they stand."""
    while time.time() < end:
        if all(rank.poll() is not None for rank in ranks.values()):
            return
        time.sleep(0.02)
    late = [name for name, rank in ranks.items() if rank.poll() is None]
    for name in late:
        ranks[name].send_signal(signal.SIGUSR1)  # faulthandler says where
    time.sleep(1.0)
    raise Failed("hangs", f"{', '.join(late)}\n{processes.said() if processes else ''}")
