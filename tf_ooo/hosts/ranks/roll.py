"""Who is there: each rank keeps a connection to rank 0, which tells all the others who has ended, and why.

Horovod's and TensorFlow's errors say that some process is gone, not which.  Lines of JSON are sent, of which
nothing is run.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from tf_ooo.errors import BackendError
from tf_ooo.hosts.ending import end_in_time
from tf_ooo.version import __version__

_LOG = logging.getLogger("tf_ooo")
_LONGEST_BYTES = 1 << 20
# An error of a communication may come before the word of who has ended.
_WORD_S = 3.0
_ASK_AGAIN_S = 5.0
_THROUGH = "its script is through"
_WITHOUT_A_WORD = "without a word, as where it is killed or has no memory left"


@dataclass(frozen=True)
class Member:
    """What a rank says of itself."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    tf_ooo: str = __version__

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"


class Line:
    """A connection to another rank: a message is a JSON object in a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._read = connection, connection.makefile("rb")
        self._sending = threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Nobody there: nothing happens."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, limit_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None: the other end is gone, silent for ``limit_s``, or says something else."""
        self._connection.settimeout(limit_s)
        with contextlib.suppress(OSError, ValueError):
            message = json.loads(self._read.readline(_LONGEST_BYTES))
            return message if isinstance(message, dict) else None
        return None

    def close(self) -> None:
        self._read.close()
        self._connection.close()


class Roll:
    """What this rank knows of the others.

    Args:
        members: all ranks, by rank.
        lines: to rank 0, or of rank 0 to all others, by rank.
        patience_s: who keeps others waiting for so long is named.
    """

    def __init__(
        self, rank: int, members: Sequence[Member], lines: Mapping[int, Line], patience_s: float
    ) -> None:
        self.rank, self.members = rank, tuple(members)
        self._lines, self._patience_s = dict(lines), patience_s
        self._changed = threading.Condition()
        # What has been heard, the earliest first: whose fits have ended, and whose process, and how.
        self._ended: dict[int, Mapping[str, Any]] = {}
        self._gone: set[int] = set()
        self._elsewhere: set[int] = set()
        self._arrived = dict.fromkeys(range(len(members)), 0)
        self._follows = self._said = False
        self._when_lost: Callable[[str], None] | None = None

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Has it called, in a thread, with who has left a fit in which this rank still is and may wait."""
        self._when_lost = call

    def start(self) -> None:
        """Listens until the end of the process, and says how that comes."""
        for rank, line in self._lines.items():
            threading.Thread(target=self._listen, args=(rank, line), name="tf_ooo roll", daemon=True).start()
        atexit.register(self._at_exit)
        self._show_error, sys.excepthook = sys.excepthook, self._ended_by

    def _at_exit(self) -> None:
        if self._said or self._follows:
            end_in_time()
        self.say_ended(_THROUGH)
        if self._follows:
            gc.freeze()  # Python frees graphs for seconds at its end

    def _ended_by(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.say_ended(error)
        self._show_error(kind, error, trace)

    def say_ended(self, why: BaseException | str) -> None:
        """Tells the others why this rank trains no more; once."""
        if self._said:
            return
        self._said = True
        text = why if isinstance(why, str) else f"{type(why).__name__}: {' '.join(str(why).split())[:500]}"
        self._tell({"ended": text, "follows": self._follows})

    def who_ended(self) -> str:
        """Which rank ended first, and why, in words; empty where nobody knows.

        What this rank says from now on is taken to follow from that.
        """
        self._follows = True
        with self._changed:
            self._changed.wait_for(self._causes, _WORD_S)
            causes = self._causes()
            return self._how(causes[0]) if causes else ""

    def _causes(self) -> list[int]:
        return [rank for rank, message in self._ended.items() if not message.get("follows")]

    def _how(self, rank: int) -> str:
        said = self._ended[rank].get("ended")
        return f"{self.members[rank]} ended{f': {said}' if said else f' {_WITHOUT_A_WORD}'}"

    def wait_for_all(self) -> None:
        """Returns when all ranks have called it as often.

        Who keeps the others waiting is named in a warning.  BackendError: it has ended, or trains in a
        ``fit`` that has nothing to do with the others'.
        """
        with self._changed:
            self._said = self._follows = False
            self._arrived[self.rank] += 1
            mine = self._arrived[self.rank]
        self._tell({"arrived": mine})
        ask_s, told = time.monotonic() + self._patience_s, False
        while missing := self._missing(mine):
            with self._changed:
                self._changed.wait(0.2)
            if time.monotonic() < ask_s:
                continue
            ask_s += _ASK_AGAIN_S
            self._tell({"ask": mine})
            if not told:
                told = True
                who = ", ".join(str(self.members[rank]) for rank in missing)
                _LOG.warning("%s", late(who, self._patience_s))

    def _missing(self, count: int) -> list[int]:
        """Who has not called so often; raises BackendError where one never will."""
        with self._changed:
            missing = [rank for rank, calls in self._arrived.items() if calls < count]
            gone = [rank for rank in self._ended if rank in self._gone and rank in missing]
            elsewhere = sorted(self._elsewhere & set(missing))
        why = ""
        if gone:
            first = next((rank for rank in gone if rank in self._causes()), gone[0])
            why = f"another worker ended: {self._how(first)}. See what it has printed, then start all again"
        elif elsewhere:
            why = (
                f"{self.members[elsewhere[0]]} trains in a fit without OOOBackprop: give all ranks the same "
                "callbacks, then start all again"
            )
        if why:
            self._follows = True
            raise BackendError(f"rank {self.rank} of {len(self.members)} stopped before training: {why}")
        return missing

    def _tell(self, message: Mapping[str, Any]) -> None:
        for line in self._lines.values():
            line.send({"from": self.rank, **message})

    def _listen(self, peer: int, line: Line) -> None:
        """Rank 0 hands on what it hears."""
        while True:
            message = line.receive()
            heard: dict[str, Any] = {"gone": True} if message is None else message
            if self.rank == 0 or message is None:
                heard["from"] = peer
            for rank in self._lines.keys() - {peer}:
                self._lines[rank].send(heard)
            self._hear(heard)
            if message is None:
                return

    def _hear(self, message: Mapping[str, Any]) -> None:
        rank = message.get("from")
        if rank not in self._arrived:
            return
        with self._changed:
            if "arrived" in message:
                self._arrived[rank] = int(message["arrived"])
                self._ended.pop(rank, None)  # that was in another fit
            if "ended" in message or "gone" in message:
                self._ended.setdefault(rank, message)
            if "gone" in message:
                self._gone.add(rank)
            if "elsewhere" in message:
                self._elsewhere.add(rank)
            self._changed.notify_all()
            never = not self._arrived[self.rank]
        if self._when_lost is not None and ("ended" in message or "gone" in message):
            # Not at once: this rank may know by itself, or come to the same error.
            timer = threading.Timer(_WORD_S, self._leave, (rank, self._when_lost))
            timer.daemon = True
            timer.start()
        if "ask" in message and never and _main_thread_trains():
            self._tell({"elsewhere": True})

    def _leave(self, rank: int, call: Callable[[str], None]) -> None:
        """Says that the rank has left, unless it has come back, or this rank has ended its fit, too."""
        with self._changed:
            message = self._ended.get(rank)
            through = message is not None and message.get("ended") == _THROUGH and rank not in self._gone
            left = message is not None and not through and not self._said and self._arrived[self.rank] > 0
            who = self._how(rank) if left else ""
        if who:
            call(who)


def _main_thread_trains() -> bool:
    from tf_ooo.compat import keras_fits  # imports TensorFlow, which options are read without

    return keras_fits.main_thread_trains()


def refusal(members: Mapping[int, Member]) -> str:
    """Why ranks do not go together; empty where they do."""
    own = members[0].tf_ooo
    different = next((member for member in members.values() if member.tf_ooo != own), None)
    if different is None:
        return ""
    return f"{different} runs tf_ooo {different.tf_ooo}, rank 0 runs {own}: install the same version for all"


def late(who: str, waited_s: float) -> str:
    """What is said of ranks that keep the others waiting."""
    return (
        f"{who} has not come to this fit for {waited_s:.0f} s: it is still reading data, or trains without "
        "OOOBackprop"
    )


def received_member(line: Line, limit_s: float) -> Member | None:
    """Who is at the other end; None: no rank."""
    with contextlib.suppress(TypeError):
        return Member(**(line.receive(limit_s) or {}))
    return None


def introduced(member: Member) -> dict[str, Any]:
    """As it is sent."""
    return asdict(member)
