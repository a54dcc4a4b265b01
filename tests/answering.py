"""Processes that answer questions: forked from this one, one for each rank, killed with all they started."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tests import forked

# The other ranks may wait for one that has failed.
GRACE_S = 15.0


@dataclass(frozen=True)
class NoAnswer:
    """Says why a rank does not answer: ``kind`` is ``"dies"`` or ``"hangs"``."""

    kind: str
    text: str
    failed: bool = True


class Answering:
    """One process, or one for each rank.

    Args:
        prepare: in a new process, what answers a question; it is given the rank.
        environments: variables for each rank; None takes one away.
        is_good: the other ranks have some more seconds where an answer is not.
        stack: is closed at the end.
    """

    def __init__(
        self,
        prepare: Callable[[int], Callable[[Any], Any]],
        environments: Sequence[Mapping[str, str | None]],
        is_good: Callable[[Any], bool],
        stack: contextlib.ExitStack | None = None,
    ) -> None:
        forked.refuse_with_runtime()
        self._is_good, self._stack = is_good, stack or contextlib.ExitStack()
        self.pids, self._connections = list[int](), list[Connection]()
        for rank, environment in enumerate(environments):
            ours, theirs = Pipe()
            pid = os.fork()
            if not pid:
                for connection in (ours, *self._connections):
                    connection.close()
                _serve(theirs, functools.partial(prepare, rank), environment)
            theirs.close()
            self.pids.append(pid)
            self._connections.append(ours)

    def ask(self, question: Any, limit_s: float) -> None:
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s
        self._answers: dict[int, Any] = {}
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send(question)

    def answers(self, wait_s: float = 0.02) -> dict[int, Any] | None:
        """Each rank's answer, or why there is none, as they came; None as long as one may still come."""
        for rank in (rank for rank in range(len(self.pids)) if rank not in self._answers):
            answer = self._answer(rank, wait_s)
            if answer is not None:
                self._answers[rank] = answer
                if not self._is_good(answer):
                    self._end = min(self._end, time.monotonic() + GRACE_S)
        missing = [rank for rank in range(len(self.pids)) if rank not in self._answers]
        if missing and time.monotonic() < self._end:
            return None
        for rank in missing:
            self.send_signal(rank, signal.SIGUSR1)  # where it is, from faulthandler
            time.sleep(0.5)
            text = f"no end after {self._limit_s:g} s, or {GRACE_S:g} s after another rank had failed"
            self._answers[rank] = NoAnswer("hangs", text)
        return self._answers

    def _answer(self, rank: int, wait_s: float) -> Any:
        connection = self._connections[rank]
        if connection.poll(wait_s):
            with contextlib.suppress(EOFError, ConnectionResetError):
                return connection.recv()
            return self._why_ended(rank, 0)
        # Its own children may hold the connection open.
        return self._why_ended(rank, os.WNOHANG)

    def _why_ended(self, rank: int, how: int) -> NoAnswer | None:
        """Say how the process of a rank ended; None if it has not."""
        pid, status = os.waitpid(self.pids[rank], how)
        if not pid:
            return None
        _kill_group(pid)
        self.pids[rank] = 0
        code = os.waitstatus_to_exitcode(status)
        return NoAnswer("dies", f"its process ended with {signal.Signals(-code).name if code < 0 else code}")

    def send_signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def interrupt(self) -> None:
        """Passes Ctrl-C on, and waits a little until what was mounted and started is taken away."""
        for rank in range(len(self.pids)):
            self.send_signal(rank, signal.SIGINT)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and not all(
            pid == 0 or self._why_ended(rank, os.WNOHANG) for rank, pid in enumerate(self.pids)
        ):
            time.sleep(0.05)

    def end(self) -> None:
        """Ends the processes and what they have started."""
        running = [pid for pid in self.pids if pid]
        for pid in running:  # all before one of them notices that another is gone, and says so
            os.kill(pid, signal.SIGKILL)
            _kill_group(pid)
        for pid in running:
            os.waitpid(pid, 0)
        for connection in self._connections:
            connection.close()
        self.pids, self._connections = [], []
        self._stack.close()


def _kill_group(pid: int) -> None:
    """All of its process group, of which a rank's process is the first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _serve(
    connection: Connection,
    prepare: Callable[[], Callable[[Any], Any]],
    environment: Mapping[str, str | None],
) -> None:
    """In the child: answers what it is asked, until it is ended."""
    status = 1
    try:
        os.setpgid(0, 0)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        forked.apply_environment(environment)
        answer = prepare()
        with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
            while True:
                connection.send(answer(connection.recv()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
