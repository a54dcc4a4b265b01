"""Tests what ranks hear of each other, over real connections of this process."""

from __future__ import annotations

import gc
import socket
import threading
from dataclasses import asdict

import pytest

from tf_ooo.errors import BackendError
from tf_ooo.hosts.devices import START_VARIABLE
from tf_ooo.hosts.ranks import roll
from tf_ooo.hosts.ranks.line import Line
from tf_ooo.hosts.ranks.rendezvous import Meeting, listening
from tf_ooo.hosts.ranks.roll import Member


def met(size):
    """Rolls of so many ranks that have met; nobody listens yet."""
    rolls = {}
    with listening("127.0.0.1", 0) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"

        def join(rank):
            rolls[rank] = Meeting(rank, size, START_VARIABLE).join(lambda: where)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        rolls[0] = Meeting(0, size, START_VARIABLE).host(listener)
        for thread in threads:
            thread.join(20)
    return [rolls[rank] for rank in range(size)]


@pytest.fixture
def heard():
    """Who has left the fit of rank 0, as it is told, and whether it was."""
    return [], threading.Event()


@pytest.fixture
def three(monkeypatch, heard):
    """Three ranks in touch."""
    words, was_told = heard
    monkeypatch.setattr(roll.atexit, "register", lambda *_: None)
    monkeypatch.setattr(roll.sys, "excepthook", roll.sys.excepthook)
    monkeypatch.setattr(roll, "end_in_time", lambda: None)  # this process goes on
    rolls = met(3)
    rolls[0].start(lambda who: (words.append(who), was_told.set()))
    for other in rolls[1:]:
        other.start(lambda who: None)
    return rolls


def test_the_first_error_is_the_cause(three):
    three[1].say_ended(ValueError("no such\nfile"))
    assert "rank 1 (process" in three[2].who_ended()
    three[2].say_ended(BackendError("another worker ended"))  # follows from it
    told = three[0].who_ended()
    assert told.startswith("rank 1 (process")
    assert told.endswith("ended: ValueError: no such file")


def test_what_a_rank_said_of_another_fit_is_forgotten(three, monkeypatch):
    monkeypatch.setattr(roll, "_WORD_S", 0.3)
    three[1].say_ended(ValueError("in the first fit"))
    assert "in the first fit" in three[0].who_ended()
    threads = [threading.Thread(target=rank.wait_for_all) for rank in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert three[0].who_ended() == ""


def test_python_does_not_free_graphs_when_it_ends_after_a_loss(three, monkeypatch):
    frozen = []
    monkeypatch.setattr(roll, "_WORD_S", 0.0)
    monkeypatch.setattr(roll.gc, "freeze", lambda: frozen.append(gc.get_count()))
    three[2]._at_exit()
    assert not frozen
    three[0].who_ended()
    three[0]._at_exit()
    assert frozen


@pytest.fixture
def told(three, heard, monkeypatch):
    """All three are in a fit, and rank 0 is told who has left it."""
    monkeypatch.setattr(roll, "_WORD_S", 0.1)
    threads = [threading.Thread(target=rank.wait_for_all) for rank in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return heard


def test_a_rank_is_told_who_has_left_its_fit(three, told):
    words, heard = told
    three[2].say_ended(ValueError("no such file"))
    assert heard.wait(20)
    assert words[0].startswith("rank 2 (process")
    assert words[0].endswith("ended: ValueError: no such file")


def test_a_rank_that_has_ended_its_fit_waits_for_nobody(three, told):
    words, heard = told
    three[0].say_ended(ValueError("the same on all"))
    three[2].say_ended(ValueError("the same on all"))
    three[1].say_ended(roll._THROUGH)
    assert not heard.wait(0.5)
    assert not words


def test_strangers_at_the_meeting_are_turned_away(monkeypatch):
    monkeypatch.setenv(START_VARIABLE, "5")
    with listening("127.0.0.1", 0) as listener:
        rolls = []
        hosting = threading.Thread(target=lambda: rolls.append(Meeting(0, 2, START_VARIABLE).host(listener)))
        hosting.start()
        for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 7}\n', b'{"rank": "x", "run": "rm"}\n', b"\xff\n"):
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(said)
        line = Line(socket.create_connection(listener.getsockname()))
        line.send(asdict(Member(1)))
        assert line.receive(20) == {"members": [asdict(member) for member in (Member(0), Member(1))]}
        hosting.join(20)
    assert [member.rank for member in rolls[0].members] == [0, 1]


def test_who_does_not_come_is_named(monkeypatch):
    monkeypatch.setenv(START_VARIABLE, "0.2")
    with listening("127.0.0.1", 0) as listener, pytest.raises(BackendError) as caught:
        Meeting(0, 4, START_VARIABLE).host(listener)
    assert str(caught.value).startswith("rank 0 of 4: rank 1, 2, 3 did not come within 0 s")
    with pytest.raises(BackendError, match="rank 2 of 4: rank 0 did not come"):
        Meeting(2, 4, START_VARIABLE).join(lambda: "")


def test_no_thread_is_made_when_a_rank_leaves(three, told, monkeypatch):
    """Python makes none any more while it ends."""
    words, heard = told
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was made"))
    three[2].say_ended(ValueError("no such file"))
    assert heard.wait(20)
    assert words
