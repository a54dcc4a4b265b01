"""Malformed inputs that need no training, and that what is wrong with an answer would be noticed."""

from __future__ import annotations

import collections

import click
import pytest

from tests.malformed.case import Case, CommandFailed, Lost
from tests.malformed.commands import fill, invoke
from tests.malformed.drawing import AREAS, area_of, drawn
from tests.malformed.fits import data, perceptron, refused_or_trains
from tests.malformed.judging import fault_of
from tests.malformed.running import outcome_of, run
from tests.zoo import needs_keras_3
from tf_ooo.errors import BackendError, OptionsError

pytestmark = [needs_keras_3, pytest.mark.takes(25)]

CHEAP = [number for number in range(60) if area_of(number) in ("options", "costs", "schedules", "commands")][
    :40
]


@pytest.mark.parametrize("number", CHEAP)
def test_refused_in_one_clear_line(number):
    outcome = run(number)
    assert not outcome.failed, f"{drawn(number).text}: {outcome.kind}: {outcome.text}"


def test_all_areas_are_drawn_and_a_number_is_always_the_same_input():
    areas = collections.Counter(drawn(number).area for number in range(100))
    assert areas.keys() == AREAS.keys()
    assert [drawn(number).text for number in range(30)] == [drawn(number).text for number in range(30)]
    assert len({drawn(number).text for number in range(300)}) > 250


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OptionsError("devices=0 is not accepted; accepted: an int of at least 1"), ""),
        (click.BadParameter("devices=0"), ""),
        (ValueError("devices=0 is not accepted"), "raised as ValueError"),
        (KeyError("devices"), "raised as KeyError"),
        (OptionsError("that is not accepted"), "does not name 'devices'"),
        (OptionsError(""), "says nothing"),
        (OptionsError("devices\nare\nwrong"), "3 lines"),
        (OptionsError("devices " * 200), "1600 characters"),
        (OptionsError("devices: 'NoneType' object is not iterable"), "says what only the code knows"),
        (CommandFailed("Usage: tf-ooo\n\nError: devices=0", 2), ""),
        (CommandFailed("Error: devices\nTraceback (most recent call last):", 1), "a traceback"),
        (CommandFailed("Error: devices", 139), "ended with 139"),
        (CommandFailed("devices!", 1), "no line says Error:"),
    ],
)
def test_what_is_wrong_with_an_error(error, fault):
    seen = fault_of(error, [["devices"]])
    assert seen.startswith(fault)
    assert bool(seen) == bool(fault)


def outcome_of_attempt(attempt):
    return outcome_of(Case("options", "", [["that"]], attempt))


def test_outcomes():
    def raises(error):
        def attempt(folder):
            raise error

        return outcome_of_attempt(attempt).kind

    assert outcome_of_attempt(lambda folder: None).kind == "accepted"
    assert raises(OptionsError("not that")) == "refused"
    assert raises(Lost("a file")) == "lost"
    assert raises(TypeError("that")) == "raised as TypeError"


def test_a_command_that_changes_a_file_and_fails_is_noticed(tmp_path, monkeypatch):
    fill(tmp_path)
    (tmp_path / "script.py").write_text("open('costs.json', 'w').close(); raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Lost, match=r"costs\.json has been changed"):
        invoke(tmp_path, "run", "--max-restarts", "0", "script.py")


class Refusing:
    """A callback that refuses in the middle of training, or at its begin after it has changed a weight."""

    def __new__(cls, changes):
        import keras

        class Callback(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                if changes:
                    self.model.layers[0].bias.assign_add([1.0] * 6)
                raise BackendError("that is refused")

        return Callback()


@pytest.mark.parametrize("changes", [True, False])
def test_a_model_that_is_changed_and_refused_is_noticed(changes):
    with pytest.raises(Lost if changes else BackendError, match="not what it was" if changes else "that is"):
        refused_or_trains(perceptron, data(), Refusing(changes))


def test_what_stock_refuses_too():
    def not_compiled():
        import keras

        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])

    import tf_ooo

    case = Case("models", "", [], lambda _: refused_or_trains(not_compiled, data(), tf_ooo.OOOBackprop()))
    assert outcome_of(case).kind == "stock refuses it"
