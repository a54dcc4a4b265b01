"""Runs set-ups in processes of their own, which may hang or die, and are renewed before they grow large."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from tests import forked, launches
from tests.fuzz.running import Outcome, run
from tests.fuzz.setups import Ranks
from tests.fuzz.several import LAUNCHES
from tests.processes import make_devices

RENEWED_AFTER = 100
TIMEOUT_S = 300.0
# The other rank may wait for one that has failed.
GRACE_S = 15.0


class Worker:
    """One process, or one for each of two ranks; forked from this one, which must have run no TensorFlow op.

    Args:
        devices: logical CPUs of a process; 0: as TensorFlow has them.
        function: what is to be run in one process, given a set-up; None: a set-up's own program.
    """

    def __init__(self, devices: int = 0, function: Callable[[Any], Outcome] | None = None) -> None:
        self.devices, self.function = devices, function
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._launched = contextlib.ExitStack()
        self._launch = ""
        self._runs = 0

    def run(self, setup: Any) -> Outcome:
        """Runs it; also where a process does not survive that."""
        ranks = getattr(setup, "ranks", None)
        if self._runs == RENEWED_AFTER or self._launch != (ranks.launch if ranks else ""):
            self.close()
        if not self._processes:
            self._start(ranks)
        self._runs += 1
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):
                connection.send(setup)
        outcomes = self._outcomes()
        first = next((outcome for outcome in outcomes if outcome.failed), outcomes[0])
        if first.kind in ("dies", "hangs") or (first.failed and ranks):
            self.close()
        return first

    def _outcomes(self) -> list[Outcome]:
        """Return the outcomes of all ranks, as they come."""
        outcomes: list[Outcome] = []
        waiting, end = dict(enumerate(self._connections)), time.monotonic() + TIMEOUT_S
        while waiting and (left_s := end - time.monotonic()) > 0:
            ready = wait(list(waiting.values()), left_s)
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                outcomes.append(self._outcome(rank, waiting.pop(rank)))
                if outcomes[-1].failed:
                    end = min(end, time.monotonic() + GRACE_S)
        if waiting:
            outcomes.append(Outcome("hangs", f"no end of rank {list(waiting)} after {TIMEOUT_S:g} s"))
        return outcomes

    def _outcome(self, rank: int, connection: Connection) -> Outcome:
        with contextlib.suppress(EOFError, ConnectionError):
            outcome: Outcome = connection.recv()
            return outcome
        process = self._processes[rank]
        process.join()
        code = process.exitcode or 0
        return Outcome("dies", f"its process ended with {signal.Signals(-code).name if code < 0 else code}")

    def _start(self, ranks: Ranks | None) -> None:
        forked.refuse_with_runtime()
        environments: list[dict[str, str | None]] = [{}]
        if ranks:
            engines = "both" if ranks.engine == "collectives" else "horovod"
            environments = self._launched.enter_context(launches.environments(engines, 2))
            environments = [own | LAUNCHES[ranks.launch] for own in environments]
        context = multiprocessing.get_context("fork")
        for environment in environments:
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            prepare = functools.partial(_prepare, environment, self.devices, ranks and ranks.engine)
            arguments = (theirs, self._connections, prepare, self.function)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            theirs.close()
        self._launch, self._runs = ranks.launch if ranks else "", 0

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._processes, self._connections = [], []
        self._launched.close()


def _serve(
    connection: Connection,
    theirs: list[Connection],
    prepare: Callable[[], None],
    function: Callable[[Any], Outcome] | None,
) -> None:
    for parents in theirs:
        parents.close()
    warnings.simplefilter("ignore")
    prepare()
    gc.collect()
    gc.freeze()  # or all that is imported is looked through whenever a session is cleared
    while True:
        try:
            setup = connection.recv()
        except EOFError:
            os._exit(0)
        started = time.process_time()
        outcome = (function or run)(setup)
        connection.send(dataclasses.replace(outcome, cpu_s=time.process_time() - started))


def _prepare(environment: Mapping[str, str | None], devices: int, engine: str | None) -> None:
    """Before the first op: TensorFlow's collectives must be set up first."""
    forked.apply_environment(environment)
    make_devices(devices)
    if engine:
        from tf_ooo import data_parallel

        data_parallel.connect(engine)
