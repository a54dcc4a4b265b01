"""Checks of single values: an OptionsError names the option, its value and what is accepted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import TypeVar

from tf_ooo.errors import OptionsError, did_you_mean

Check = Callable[[str, object], None]
Value = TypeVar("Value")


def option(default: Value, check: Check, *, of_policy: bool = False) -> Value:
    """Return a field of a dataclass of options; ``check`` is called with its name and value.

    ``of_policy``: only the policies that list it read it; with another schedule values other than None are
    refused.
    """
    return field(default=default, metadata={"check": check, "of_policy": of_policy})


def choice(accepted: Iterable[str]) -> Check:
    """Return one of some texts; what is close to one of them is asked about."""
    accepted = tuple(accepted)

    def check(name: str, value: object) -> None:
        if isinstance(value, str) and value in accepted:
            return
        hint = did_you_mean(value, accepted) if isinstance(value, str) else ""
        raise OptionsError(f"{name}={value!r:.80} is not accepted{hint}; accepted: {listed(accepted)}")

    return check


def _check(accepted: str, is_accepted: Callable[[object], bool]) -> Check:
    """Refuses other values; ``accepted`` says what would do."""

    def check(name: str, value: object) -> None:
        if not is_accepted(value):
            raise OptionsError(f"{name}={value!r:.80} is not accepted; accepted: {accepted}")

    return check


def whole_number(least: int, *, optional: bool = False) -> Check:
    """Return an int of at least ``least``, or None where it is ``optional``."""

    def is_accepted(value: object) -> bool:
        if value is None:
            return optional
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return _check(f"{'None or ' if optional else ''}an int of at least {least}", is_accepted)


def number_or_numbers(least: int) -> Check:
    """Return None, an int of at least ``least``, or a list of ints above that, none of which is left out."""

    def is_number(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    def is_accepted(value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return bool(value) and all(is_number(each, max(1, least)) for each in value)
        return value is None or is_number(value, least)

    return _check(f"None, an int of at least {least}, or a list with one of at least 1 for each", is_accepted)


def _is_number_or_auto(value: object) -> bool:
    return value is None or value == "auto" or (isinstance(value, int) and value is not True and value >= 1)


number_or_auto = _check("None, 'auto', or an int of at least 1", _is_number_or_auto)


parts_or_auto = _check(
    "'auto', or an int of at least 1", lambda value: value is not None and _is_number_or_auto(value)
)


def _are_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_folder(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


seconds = _check("None or seconds from 0", lambda value: value is None or _are_seconds(value))
seconds_from_0 = _check("seconds from 0", _are_seconds)
folder = _check("None or a folder", lambda value: value is None or _is_folder(value))
flag = _check("True, False", lambda value: isinstance(value, bool))
yes_no_or_none = _check("True, False, None", lambda value: value is None or isinstance(value, bool))


def listed(accepted: Iterable[str]) -> str:
    """Return texts in quotes, separated by commas."""
    return ", ".join(repr(item) for item in accepted)
