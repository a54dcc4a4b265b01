"""Tests who is lost, by what workers answer: no worker and no network here."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from tf_ooo.hosts import watch
from tf_ooo.hosts.watch import Silence
from tf_ooo.hosts.worker import own_facts

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
AT_JOINING = {task: own_facts(ADDRESSES, task) for task in (1, 2)}
ANEW = "it has been started anew, and what it held is gone"


@pytest.fixture
def workers(monkeypatch):
    """Return what each worker says, by task, and the connections that were closed."""
    says, closed = dict(AT_JOINING), []

    class Line:
        def __init__(self, target, task):
            assert target == f"grpc://{ADDRESSES[task]}"
            self.task = task

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def ask(self, timeout_s):
            return says[self.task]

        def abandon(self):
            pass

    monkeypatch.setattr(watch, "Line", Line)
    monkeypatch.setattr(watch, "answers", lambda address, wait_s: "")
    monkeypatch.setattr(watch, "cut", closed.append)
    monkeypatch.setattr(watch, "end_in_time", lambda: None)  # this process goes on
    return says, closed


def start_anew(says, task):
    says[task] = dataclasses.replace(says[task], started=f"{says[task].started}, and again")


def test_workers_that_answer_are_not_lost(workers):
    assert watch.Watch(AT_JOINING, Silence(30.0)).look() == {}


def test_a_worker_that_was_started_anew_is_lost_when_asked(workers):
    start_anew(workers[0], 2)
    assert watch.Watch(AT_JOINING, Silence(30.0)).look() == {2: ANEW}


def test_a_worker_that_is_started_anew_is_noticed_while_nobody_asks(workers, monkeypatch):
    says, closed = workers
    lost, noticed = watch.Watch._lose, threading.Event()

    def losing(self, task, reason):
        lost(self, task, reason)
        noticed.set()

    monkeypatch.setattr(watch.Watch, "_lose", losing)
    watching = watch.Watch(AT_JOINING, Silence(30.0))
    start_anew(says, 1)
    watching.start()
    try:
        assert noticed.wait(20)
    finally:
        watching.stop()
    assert watching.lost == {1: ANEW}
    assert ADDRESSES[1] in closed
    assert ADDRESSES[2] not in closed


def test_the_end_waits_for_an_answer_that_comes_late(workers, monkeypatch):
    """A thread inside TensorFlow at the end of Python would crash the process."""
    late, ended = threading.Event(), []

    def ask(self, timeout_s):
        late.wait(20)
        ended.append(self.task)
        return AT_JOINING[self.task]

    monkeypatch.setattr(watch.Line, "ask", ask)
    monkeypatch.setattr(watch, "cut", lambda address: late.set())
    watching = watch.Watch(AT_JOINING, Silence(0.5))
    assert sorted(watching.look()) == [1, 2]
    assert not ended
    watching.stop()
    assert sorted(ended) == [1, 2]
