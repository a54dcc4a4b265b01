"""Runs set-ups in a process of their own, which may hang or die, and is renewed before it grows large."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests import forked
from tests.fuzz.running import Outcome, run
from tests.processes import make_devices

RENEWED_AFTER = 100
TIMEOUT_S = 300.0


class Worker:
    """Forked from this process, which must have run no TensorFlow op.

    Args:
        devices: logical CPUs of the process; 0: as TensorFlow has them.
        function: what is to be run in it, given a set-up; None: a set-up's own program.
    """

    def __init__(self, devices: int = 0, function: Callable[[Any], Outcome] | None = None) -> None:
        self.devices, self.function = devices, function
        self._process: multiprocessing.process.BaseProcess | None = None
        self._runs = 0

    def run(self, setup: Any) -> Outcome:
        """Runs it; also where the process does not survive that."""
        if self._runs == RENEWED_AFTER:
            self.close()
        if self._process is None:
            self._start()
        self._runs += 1
        try:
            self._connection.send(setup)
            if self._connection.poll(TIMEOUT_S):
                outcome: Outcome = self._connection.recv()
                return outcome
        except (EOFError, ConnectionError):
            return Outcome("dies", f"its process ended with {self._ended()}")
        self.close()
        return Outcome("hangs", f"no end after {TIMEOUT_S:g} s")

    def _start(self) -> None:
        forked.refuse_with_runtime()
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._connection, self.devices, self.function), daemon=True
        )
        self._process.start()
        theirs.close()
        self._runs = 0

    def _ended(self) -> str:
        """What the process, which has ended, ended with."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        self.close()
        return signal.Signals(-code).name if code < 0 else str(code)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = None


def _serve(
    connection: Connection, theirs: Connection, devices: int, function: Callable[[Any], Outcome] | None
) -> None:
    theirs.close()
    warnings.simplefilter("ignore")
    make_devices(devices)
    while True:
        try:
            setup = connection.recv()
        except EOFError:
            os._exit(0)
        started = time.process_time()
        outcome = (function or run)(setup)
        connection.send(dataclasses.replace(outcome, cpu_s=time.process_time() - started))
