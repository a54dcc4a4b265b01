"""Tests what is said while long work goes on before the first step."""

from __future__ import annotations

import time

import pytest

from tf_ooo.fit import timing


def fit(verbose):
    """As Keras' own does, it has an argument of that name, and runs what it is given below it."""
    with timing.said("planning"):
        time.sleep(0.01)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(timing, "AFTER_S", 0.0)


def test_long_work_is_said_when_it_begins_and_when_it_ends(at_once, capsys):
    fit(verbose=1)
    printed = capsys.readouterr()
    begun, ended = printed.err.splitlines()
    assert begun == "tf_ooo: planning ..."
    assert ended.startswith("tf_ooo: planning: 0.")
    assert ended.endswith(" s")
    assert not printed.out


def test_short_work_and_a_silent_fit_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr(timing, "AFTER_S", 60.0)
    fit(verbose=1)
    monkeypatch.setattr(timing, "AFTER_S", 0.0)
    fit(verbose=0)
    with timing.said("no fit at all"):
        pass
    assert not capsys.readouterr().err


def test_an_error_ends_it(at_once, capsys):
    def fit(verbose):
        with timing.said("planning"):
            time.sleep(0.01)
            raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        fit(verbose=2)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_seconds_that_are_known_later_are_said_then(monkeypatch, capsys):
    monkeypatch.setattr(timing, "AFTER_S", 0.05)

    def fit(verbose, seconds):
        with timing.said("looking") as say_seconds:
            say_seconds(seconds)
            time.sleep(0.1)

    fit(1, 7.0)
    assert capsys.readouterr().err.splitlines()[:-1] == ["tf_ooo: looking, about 7 s ..."]
    fit(1, 0.01)
    assert capsys.readouterr().err.splitlines()[:-1] == ["tf_ooo: looking ..."]
    fit(0, 7.0)
    assert not capsys.readouterr().err


def test_a_line_of_its_own_beside_the_progress_bar(at_once, capsys):
    def fit(verbose, begin_step):
        with timing.said("planning"):
            time.sleep(0.01)

    fit(verbose="auto", begin_step=3)
    assert capsys.readouterr().err.startswith("\ntf_ooo: planning ...\n")
    for verbose, begin_step in ((2, 3), (1, 0)):
        fit(verbose, begin_step)
        assert capsys.readouterr().err.startswith("tf_ooo: planning ...\n")
