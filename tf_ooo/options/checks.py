"""Checks of single values: an OptionsError names the option, its value and what is accepted."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import TypeVar

from tf_ooo.errors import OptionsError

Check = Callable[[str, object], None]
Value = TypeVar("Value")


def option(default: Value, check: Check, *, of_policy: bool = False) -> Value:
    """A field of a dataclass of options.

    Args:
        default: its value where the user gives none.
        check: called with the field's name and value.
        of_policy: only the policies that list it among their options read it; with any other schedule a value
            other than None is refused.
    """
    return field(default=default, metadata={"check": check, "of_policy": of_policy})


def choice(accepted: Iterable[str]) -> Check:
    """One of some texts; what is close to one of them is asked about."""
    accepted = tuple(accepted)

    def check(name: str, value: object) -> None:
        if isinstance(value, str) and value in accepted:
            return
        hint = did_you_mean(value, accepted) if isinstance(value, str) else ""
        raise OptionsError(f"{name}={value!r} is not accepted{hint}; accepted: {listed(accepted)}")

    return check


def whole_number(least: int, *, optional: bool = False) -> Check:
    """An int of at least ``least``, or None where it is ``optional``."""

    def check(name: str, value: object) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            also = "None or " if optional else ""
            raise OptionsError(
                f"{name}={value!r} is not accepted; accepted: {also}an int of at least {least}"
            )

    return check


def seconds(name: str, value: object) -> None:
    """None or a finite number from 0."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise OptionsError(f"{name}={value!r} is not accepted; accepted: None or seconds from 0")


def folder(name: str, value: object) -> None:
    """None or a path that is not empty."""
    if value is not None and (not isinstance(value, (str, os.PathLike)) or not os.fspath(value)):
        raise OptionsError(f"{name}={value!r} is not accepted; accepted: None or a folder")


def flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise OptionsError(f"{name}={value!r} is not accepted; accepted: True, False")


def did_you_mean(value: str, accepted: Iterable[str]) -> str:
    """A question, in brackets, if one of the accepted texts is close; else nothing."""
    close = difflib.get_close_matches(value, list(accepted), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listed(accepted: Iterable[str]) -> str:
    """Texts in quotes, separated by commas."""
    return ", ".join(repr(item) for item in accepted)
