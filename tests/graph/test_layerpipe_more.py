"""``mode="layerpipe"``: fits that go on, and what is refused: see layerpipe_more.py."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import found_by

SCRIPT = Path(__file__).with_name("layerpipe_more.py")


def check(name):
    return found_by(SCRIPT, name)[name]


def test_a_fit_with_the_costs_of_another_is_that_fit_going_on():
    """Also of layers side by side, which are measured in another order, and over the same link."""
    found = check("resumed_with_its_costs")
    assert found.pop("link_s") == [30e-6] * 2
    assert set(found.values()) == {True}, found


def test_saving_within_an_epoch_says_what_is_ahead():
    found = check("saved_ahead")
    (note,) = found.pop("ahead")
    assert "BackupAndRestore" in note
    assert "with drain_steps=N" in note
    assert set(map(len, found.values())) == {0}, found


def test_early_stopping_puts_back_the_best_weights():
    assert check("best_weights") == {"epochs": 2, "equal": True}


def test_steps_that_devices_would_change_are_refused():
    found = check("custom_steps_are_refused")
    assert len(found) == 4
    for name, text in found.items():
        wanted = "again after it has applied" if name.startswith("Adversary") else "applies no gradient"
        assert wanted in text, name


def test_what_is_refused_has_trained_nothing():
    found = check("refused_before_the_first_step")
    texts = {
        "global_clipnorm": "clipping by global norm",
        "schedule": "a LearningRateSchedule can warm up itself",
        "scaled": "without loss scaling",
        "gated": "no condition (tf.cond, ops.cond) on what weights compute",
        "loop": "layer 'lstm' (LSTM) has a loop",
    }
    assert found.keys() == texts.keys()
    for name, (text, untouched) in found.items():
        assert texts[name] in text, name
        assert untouched, name
