"""Knows which ranks are there: each is connected to rank 0, which tells the others who has ended, and why.

Horovod's and TensorFlow's errors say that some process is gone, not which.  Ranks send lines of JSON, which
are never executed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tf_ooo.errors import BackendError
from tf_ooo.hosts.native import end_in_time
from tf_ooo.hosts.ranks.line import Attention, Line, can_keep_alive, ending_without
from tf_ooo.version import __version__

_LOG = logging.getLogger("tf_ooo")
# An error of a communication may come before the word of who has ended.
_WORD_S = 3.0
_ASK_AGAIN_S = 5.0
_MOMENT_S = 0.2
_LEFT = {"ended", "gone", "silent"}
_THROUGH = "its script is through"
_WITHOUT_A_WORD = "without a word, as where it is killed or has no memory left"


@dataclass(frozen=True)
class Member:
    """Identifies a rank."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    pulses: bool = field(default_factory=can_keep_alive)
    tf_ooo: str = __version__

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"


class Roll:
    """Keeps what this rank knows of the others.

    Args:
        members: all ranks, by rank.
        lines: the connections to rank 0, or rank 0's to all others, by rank.
        patience_s: a rank that keeps others waiting for so long is named.

    Attributes:
        in_fit: whether this rank is in a fit.
    """

    def __init__(
        self, rank: int, members: Sequence[Member], lines: Mapping[int, Line], patience_s: float
    ) -> None:
        self.rank, self.members = rank, tuple(members)
        self._lines, self._patience_s = dict(lines), patience_s
        self._changed = threading.Condition()
        # These ends have been heard, earliest first: whose fits have ended, and whose process, and how.
        self._ended: dict[int, Mapping[str, Any]] = {}
        self._gone, self._silent, self._elsewhere = set[int](), set[int](), set[int]()
        self._arrived = dict.fromkeys(range(len(members)), 0)
        self._follows = self._said = self.in_fit = False
        self._leaving: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()

    def start(self, when_lost: Callable[[str], object]) -> None:
        """Listen until the end of the process, and tell the others how it ends.

        ``when_lost`` is called, in a thread, when a rank has left a fit in which this rank still is.
        """
        for rank, line in self._lines.items():
            line.keep_alive()
            threading.Thread(target=self._listen, args=(rank, line), name="tf_ooo roll", daemon=True).start()
        # It exists before anybody leaves: Python makes no thread any more while it ends.
        threading.Thread(target=self._say_who_left, args=[when_lost], name="tf_ooo roll", daemon=True).start()
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
        """Tell the others, once, why this rank trains no more."""
        if self._said:
            return
        self._said = True
        text = why if isinstance(why, str) else f"{type(why).__name__}: {' '.join(str(why).split())[:500]}"
        self._tell({"ended": text, "follows": self._follows})

    def who_ended(self) -> str:
        """Say which rank ended first, and why; empty if nobody knows.

        An end of this rank from now on is taken to follow from that.
        """
        self._follows = True
        with self._changed:
            self._changed.wait_for(self._causes, _WORD_S)
            causes = self._causes()
            return self._how(causes[0]) if causes else ""

    def _causes(self) -> list[int]:
        return [rank for rank, message in self._ended.items() if not message.get("follows")]

    def _how(self, rank: int) -> str:
        if rank in self._silent:
            return self._silence(rank)
        said = self._ended[rank].get("ended")
        return f"{self.members[rank]} ended{f': {said}' if said else f' {_WITHOUT_A_WORD}'}"

    def _silence(self, rank: int) -> str:
        since = f"for {Attention.SILENCE_S:.0f} s"
        return f"{self.members[rank]} has said nothing {since}: it is stopped, or cannot be reached"

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this equally often.

        A warning names the ranks that keep others waiting.  BackendError: a rank has ended, does not answer,
        or trains in an unrelated ``fit``.
        """
        with self._changed:
            self._said = self._follows = False
            for rank in self._silent:  # it may have gone on; if not, that is heard again
                self._ended.pop(rank, None)
            self._silent.clear()
            self._arrived[self.rank] += 1
            mine = self._arrived[self.rank]
        self._tell({"arrived": mine})
        ask_s, told = time.monotonic() + self._patience_s, False
        attention = Attention(self._lines)
        while missing := self._missing(mine):
            self._listen_for_a_moment(attention)
            if time.monotonic() < ask_s:
                continue
            ask_s += _ASK_AGAIN_S
            self._tell({"ask": mine})
            if not told:
                told = True
                who = ", ".join(str(self.members[rank]) for rank in missing)
                _LOG.warning("%s", late(who, self._patience_s))
        self.in_fit = True

    def _listen_for_a_moment(self, attention: Attention) -> None:
        with self._changed:
            self._changed.wait(_MOMENT_S)
        for rank in attention.silent():
            message = {"from": rank, "silent": True}
            self._hear(message)
            self._hand_on(message, rank)

    @contextlib.contextmanager
    def all_needed(self) -> Iterator[None]:
        """Guard a block in which a library starts that waits for all ranks, then aborts or never ends.

        If a rank has left or is silent, and the block does not end soon after, this process ends with status
        1 and a line that names the rank: no thread can end such a wait.
        """
        ended = threading.Event()

        def listen() -> None:
            attention = Attention(self._lines)
            while not ended.is_set():
                if not self._lost():
                    self._listen_for_a_moment(attention)
                elif not ended.wait(_WORD_S) and (lost := self._lost()):
                    self._end(self._before_training(self._named(lost)))

        thread = threading.Thread(target=listen, name="tf_ooo roll", daemon=True)
        thread.start()
        try:
            with ending_without(self._lines, self._lines_of_end(), _WORD_S + _WORD_S):
                yield
        finally:
            ended.set()
            thread.join()

    def lost_before_training(self) -> BackendError:
        """Return the error to raise if a library says that another rank is gone."""
        return self._before_training(f"another worker ended{f': {who}' if (who := self.who_ended()) else ''}")

    def _lines_of_end(self) -> dict[int, tuple[str, str | None]]:
        """Return the texts with which a thread of C says that a rank has gone, or is silent."""
        texts: dict[int, tuple[str, str | None]] = {}
        for rank in self._lines:
            member = self.members[rank]
            said = (f"ended: {member}", f"is silent: {self._silence(rank)}")
            gone, silent = (_as_raised(self._before_training(f"another worker {text}")) for text in said)
            texts[rank] = gone, silent if member.pulses else None
        return texts

    def _end(self, why: BackendError) -> None:
        self._follows = True
        self.say_ended(why)
        sys.stdout.flush()
        print(_as_raised(why), file=sys.stderr, flush=True)
        os._exit(1)

    def _lost(self) -> list[int]:
        """Return the ranks that have ended or are silent, in the order in which that was noticed."""
        with self._changed:
            return [rank for rank in self._ended if rank in self._gone | self._silent]

    def _named(self, lost: Sequence[int]) -> str:
        """Name the first lost rank that is a cause."""
        with self._changed:
            causes = self._causes()
            first = next((rank for rank in lost if rank in causes), lost[0])
            does = "is silent" if first in self._silent else "ended"
            return f"another worker {does}: {self._how(first)}"

    def _before_training(self, why: str) -> BackendError:
        said = f"stopped before training: {why}. See what it has printed, then start all again"
        return BackendError(f"rank {self.rank} of {len(self.members)} {said}")

    def _missing(self, count: int) -> list[int]:
        """Return the ranks that have not called so often; raise BackendError if one never will."""
        with self._changed:
            missing = [rank for rank, calls in self._arrived.items() if calls < count]
            gone = [rank for rank in self._lost() if rank in self._silent or rank in missing]
            elsewhere = sorted(self._elsewhere & set(missing))
        if gone or elsewhere:
            self._follows = True
        if gone:
            raise self._before_training(self._named(gone))
        if elsewhere:
            trains = f"{self.members[elsewhere[0]]} trains in a fit without OOOBackprop"
            raise self._before_training(f"{trains}: give all ranks the same callbacks")
        return missing

    def _tell(self, message: Mapping[str, Any]) -> None:
        for line in self._lines.values():
            line.send({"from": self.rank, **message})

    def _hand_on(self, message: Mapping[str, Any], peer: int) -> None:
        """Hand a message on, on rank 0, to all but its sender and its subject; others only know rank 0."""
        for rank in self._lines.keys() - {peer}:
            self._lines[rank].send(message)

    def _listen(self, peer: int, line: Line) -> None:
        while True:
            message = line.receive()
            heard: dict[str, Any] = {"gone": True} if message is None else message
            if self.rank == 0 or message is None:
                heard["from"] = peer
            self._hand_on(heard, peer)
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
                self._silent.discard(rank)
            if _LEFT & message.keys():
                self._ended.setdefault(rank, message)
            if "gone" in message:
                self._gone.add(rank)
            if "silent" in message:
                self._silent.add(rank)
            if "elsewhere" in message:
                self._elsewhere.add(rank)
            self._changed.notify_all()
            never = not self._arrived[self.rank]
        if "ended" in message or "gone" in message:
            # Not at once: this rank may know by itself, or come to the same error.
            self._leaving.put((time.monotonic() + _WORD_S, rank))
        if "ask" in message and never and _main_thread_trains():
            self._tell({"elsewhere": True})

    def _say_who_left(self, when_lost: Callable[[str], object]) -> None:
        """Say that a rank has left, unless it has come back, or this rank has ended its fit, too."""
        while True:
            due_s, rank = self._leaving.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self._changed:
                message = self._ended.get(rank)
                through = message is None or (message.get("ended") == _THROUGH and rank not in self._gone)
                who = "" if through or self._said or not self.in_fit else self._how(rank)
            if who:
                when_lost(who)


def _main_thread_trains() -> bool:
    from tf_ooo.compat import keras_fits  # imports TensorFlow, which options are read without

    return keras_fits.main_thread_trains()


def _as_raised(error: BackendError) -> str:
    """Return the last line of Python's message for the error."""
    return f"{type(error).__module__}.{type(error).__name__}: {error}"


def refusal(members: Mapping[int, Member]) -> str:
    """Say why ranks do not fit together; empty if they do."""
    own = members[0].tf_ooo
    for member in members.values():
        if (theirs := member.tf_ooo) != own:
            return f"{member} runs tf_ooo {theirs}, rank 0 runs {own}: install the same version for all"
    return ""


def late(who: str, waited_s: float) -> str:
    """Say that ranks keep the others waiting."""
    return (
        f"{who} has not come to this fit for {waited_s:.0f} s: it is still reading data, or trains without "
        "OOOBackprop"
    )


def received_member(line: Line, limit_s: float) -> Member | None:
    """Return the member at the other end; None: it is no rank."""
    with contextlib.suppress(TypeError):
        return Member(**(line.receive(limit_s) or {}))
    return None
