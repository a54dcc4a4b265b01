"""Worker processes for the tests of clusters, and how they are lost.

A test that joins a cluster is the client itself: it starts the workers before its first TensorFlow op, and is
marked ``alone``, as a process that has lost a worker can join no more.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import keras
import pytest

import tf_ooo
from tests import forked, launches
from tf_ooo.hosts.cluster import connect

# Tests that stop a worker take this: a worker that is only slow answers within it.
SHORT_SILENCE_S = 8.0


def addresses(count):
    return ",".join(f"127.0.0.1:{port}" for port in launches.free_ports(count))


def address_of(cluster, task):
    return cluster.split(",")[task]


def device_of(task):
    return f"/job:worker/replica:0/task:{task}/device:CPU:0"


def run_command(main: Callable[[], object], *arguments: object) -> None:
    """A command's ``main`` in a process of its own, which ends when the one that started it does."""
    forked.end_with_parent()
    sys.argv = ["command", *map(str, arguments)]
    main()


def start_worker(cluster, task):
    """``tf-ooo worker``; not ready yet."""
    from tf_ooo.cli import main

    return forked.start(run_command, main, "worker", "--cluster", cluster, "--task", task)


def start_worker_program(cluster, task):
    """Start a worker as :func:`start_worker`, in a new Python as a user does."""
    command = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--task", str(task)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=launches.script_environment(), **pipes)


def wait_until_ready(process):
    lines = [process.stdout.readline()]
    while "is ready" not in lines[-1]:
        assert lines[-1], f"the worker ended: {''.join(lines)}"
        lines.append(process.stdout.readline())


@contextlib.contextmanager
def running(processes: Iterable[forked.Forked]) -> Iterator[None]:
    """Waits until these workers are ready; kills them at the end."""
    processes = list(processes)
    try:
        for process in processes:
            wait_until_ready(process)
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def workers(cluster, tasks, start=start_worker):
    """The processes by task."""
    started = {task: start(cluster, task) for task in tasks}
    with running(started.values()):
        yield started


def lose(process, how):
    """Kills or stops a worker, and returns when it computes and answers no more."""
    process.send_signal(how)
    if how == signal.SIGKILL:
        process.wait()
    else:
        os.waitpid(process.pid, os.WUNTRACED)


def join(cluster, how=signal.SIGKILL):
    """The cluster, whose silent workers are noticed soon where silence is what the test is about."""
    return connect(cluster, silence_s=SHORT_SILENCE_S) if how == signal.SIGSTOP else connect(cluster)


@contextlib.contextmanager
def raises_lost(cluster, task=1):
    """The block raises an error that names this worker, and no other."""
    with pytest.raises(tf_ooo.BackendError) as raised:
        yield
    named = re.findall(r"worker (\S+) \(task (\d+)\)", str(raised.value))
    assert named == [(address_of(cluster, task), str(task))], str(raised.value)
    assert "last checkpoint" in str(raised.value)


class NthCall(keras.callbacks.Callback):
    """Calls a function when Keras has called a method of callbacks so many times.

    Args:
        method: such as ``"on_epoch_end"``.
        number: from 1.
        function: without arguments.
    """

    def __init__(self, method, number, function):
        super().__init__()
        self._left, self._function = number, function
        setattr(self, method, self._called)

    def _called(self, *args, **kwargs):
        self._left -= 1
        if self._left == 0:
            self._function()
