"""Notices workers that are gone or silent, so that nothing waits for them.

TensorFlow itself notices a process that ended: its connections close and the step fails at once.
A machine that lost its power, or a process that was stopped, just never answers: it is asked every 5 s, and
after 30 s of silence this process' connections to it are closed, so that whatever waits fails.  While
TensorFlow holds Python's lock nobody here can ask: threads of C watch for silence.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache

from grappler_passes.compat import runtime
from tf_ooo.errors import BackendError
from tf_ooo.hosts.devices import answers, host_port
from tf_ooo.hosts.native import end_in_time, load
from tf_ooo.hosts.worker import Facts, Line, in_a_line


class Silence:
    """Watches workers until the end of the process, or until :meth:`stop`.

    A worker that sends no greeting for ``silence_s`` seconds is silent: from then on this process'
    connections to it are closed every second, so that whatever waits for it fails.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._peers: dict[int, int] = {}

    def watch(self, task: int, address: str) -> None:
        """Watch one more worker. BackendError: the library is not compiled, or there is no thread left."""
        peer = _library().ooo_watch(*_where(address), ctypes.c_double(self.silence_s))
        if peer is None:
            raise BackendError(f"worker {address} cannot be watched: this process can start no thread")
        self._peers[task] = peer

    def text(self) -> str:
        return f"it has not answered for {self.silence_s:.0f} s"

    def tasks(self) -> list[int]:
        """Return the tasks of silent workers."""
        return [task for task, peer in self._peers.items() if _library().ooo_silent(peer)]

    def stop(self) -> None:
        """Stop watching, so that no worker is silent any more."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            _library().ooo_unwatch(peer)


def cut(address: str) -> int:
    """Close this process' TCP connections to an address; return how many.

    Calls that wait for an answer from there fail now.  TensorFlow has no deadline for its remote calls, and
    asking it whether a worker lives blocks all of Python if that worker is silent.
    """
    closed: int = _library().ooo_cut(*_where(address))
    return closed


def _where(address: str) -> tuple[ctypes.Array[ctypes.c_char_p], int, int]:
    """Return the IP addresses, their number, and the port; none if the name is not known."""
    host, port = host_port(address)
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        known = []
    hosts = [str(info[4][0]).partition("%")[0].encode() for info in known]
    return (ctypes.c_char_p * len(hosts))(*hosts), len(hosts), port


@cache
def _library() -> ctypes.CDLL:
    library = load("_silence")
    library.ooo_watch.restype = ctypes.c_void_p
    for name in ("ooo_silent", "ooo_unwatch"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.ooo_unwatch.restype = None
    return library


logger = logging.getLogger("tf_ooo")
SILENCE_S = 30.0
# A worker is asked so often before it is lost, and the clock is read so often between two questions.
_QUESTIONS, _LOOKS = 6, 5
_MOST_ANSWER_S = 10.0


class Watch:
    """Asks each worker of a cluster in a thread, six times in ``silence_s``; without an answer it is lost.

    ``workers``: the facts of each when the cluster was joined, ``lost``: why one is lost, by task;
    ``silence`` watches the same workers.
    """

    def __init__(self, workers: Mapping[int, Facts], silence: Silence) -> None:
        self.lost: dict[int, str] = {}
        self._workers, self._silence = dict(workers), silence
        self._interval_s = silence.silence_s / _QUESTIONS
        self._answer_s = min(silence.silence_s, _MOST_ANSWER_S)
        self._answered: dict[int, float] = {}
        self._ended = threading.Event()
        self._asking: dict[int, threading.Thread] = {}
        self._looking: list[threading.Thread] = []
        self._connecting: set[int] = set()

    def start(self) -> None:
        """Watch until :meth:`stop`, or the end of the process."""
        self._answered = dict.fromkeys(self._workers, time.monotonic())
        self._asking = {task: _thread(self._ask, task) for task in self._workers}
        _thread(self._watch)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the threads: one inside TensorFlow would crash the process at its end."""
        self._ended.set()
        deadline_s = time.monotonic() + self._answer_s + 2.0
        while self._in_tensorflow() and time.monotonic() < deadline_s:
            for task in list(self.lost):  # nobody waits for its answer
                cut(self._workers[task].addresses[task])
            time.sleep(0.01)
        if self.lost:
            end_in_time()
            gc.freeze()  # Python frees graphs and what holds tensors of the worker for seconds at its end

    def _in_tensorflow(self) -> bool:
        threads = [thread for task, thread in self._asking.items() if task not in self._connecting]
        return any(thread.is_alive() for thread in (*threads, *self._looking))

    def look(self) -> dict[int, str]:
        """Ask all workers that are not lost; return why each lost one is lost, by task."""
        for task in self._silence.tasks():
            self._lose(task, self._silence.text())
        reasons: dict[int, str] = {}

        def ask(task: int) -> None:
            reasons[task] = self._why_lost(task)

        # Nobody has to wait for these threads: a call may hang although it was given a deadline.
        asked = {task: _thread(ask, task) for task in self._workers if task not in self.lost}
        self._looking = [*filter(threading.Thread.is_alive, self._looking), *asked.values()]
        deadline = time.monotonic() + self._answer_s
        for task, thread in asked.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            reason = reasons.get(task, f"no answer within {self._answer_s:.0f} s")
            if reason:
                self._note(task, reason)
        return dict(self.lost)

    def _why_lost(self, task: int) -> str:
        address = self._workers[task].addresses[task]
        reason = answers(address, self._answer_s)
        if not reason:
            try:
                with Line(f"grpc://{address}", task) as line:
                    return self._if_restarted(task, line.ask(self._answer_s))
            except Exception as error:
                reason = in_a_line(error)
        return f"it does not answer: {reason}"

    def _if_restarted(self, task: int, facts: Facts) -> str:
        same = facts.started == self._workers[task].started
        return "" if same else "it has been started anew, and what it held is gone"

    def _ask(self, task: int) -> None:
        """Ask one worker repeatedly, until it is lost."""
        address = self._workers[task].addresses[task]
        line = Line(f"grpc://{address}", task)
        while not self._ended.is_set() and task not in self.lost:
            self._connecting.add(task)
            refused = answers(address, self._answer_s)
            self._connecting.discard(task)
            if "refused" in refused:  # the machine lives, the process does not
                self._lose(task, f"it does not answer: {refused}")
            elif not refused and not self._ended.is_set() and task not in self._silence.tasks():
                self._ask_once(task, line)
            self._ended.wait(self._interval_s)
        if task in self.lost:
            line.abandon()

    def _ask_once(self, task: int, line: Line) -> None:
        with contextlib.suppress(Exception):
            reason = self._if_restarted(task, line.ask(self._answer_s))
            self._answered[task] = time.monotonic()
            if reason:
                self._lose(task, reason)

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            if self._ended.wait(self._interval_s / _LOOKS):
                return
            if time.monotonic() - began > self._interval_s:
                # This process itself was stopped (Ctrl-Z): nobody was asked.
                self._answered = dict.fromkeys(self._workers, time.monotonic())
            late = time.monotonic() - self._silence.silence_s
            silent = [task for task, answered in self._answered.items() if answered < late]
            for task in {*silent, *self._silence.tasks()} - self.lost.keys():
                self._lose(task, self._silence.text())
            for task in list(self.lost):  # TensorFlow 2.15 connects, and waits, again
                cut(self._workers[task].addresses[task])

    def _lose(self, task: int, reason: str) -> None:
        address = self._workers[task].addresses[task]
        if task not in self.lost and not self._ended.is_set():
            logger.error("lost worker %s (task %d): %s", address, task, reason)
        self._note(task, reason)
        cut(address)

    def _note(self, task: int, reason: str) -> None:
        if task not in self.lost:
            runtime.keep_functions()  # nobody is there to forget them
        self.lost.setdefault(task, reason)


def _thread(function: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name=f"tf_ooo {function.__name__}", daemon=True)
    thread.start()
    return thread
