"""Defines the options of every mode, and how each value is checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeGuard, TypeVar

from tf_ooo.errors import OptionsError, did_you_mean
from tf_ooo.planning.policies import POLICIES, schedules_of

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


def accepting(accepted: str, is_accepted: Callable[[object], bool]) -> Check:
    """Refuses other values; ``accepted`` says what would do."""

    def check(name: str, value: object) -> None:
        if not is_accepted(value):
            raise OptionsError(f"{name}={value!r:.80} is not accepted; accepted: {accepted}")

    return check


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole_number(least: int, *, optional: bool = False) -> Check:
    """Accept an int of at least ``least``, or None where it is ``optional``."""
    accepted = f"{'None or ' if optional else ''}an int of at least {least}"
    return accepting(accepted, lambda value: optional if value is None else _is_int(value, least))


def number_or_numbers(least: int) -> Check:
    """Accept None, an int of at least ``least``, or a list of such ints of at least 1."""

    def is_accepted(value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return bool(value) and all(_is_int(each, max(1, least)) for each in value)
        return value is None or _is_int(value, least)

    return accepting(
        f"None, an int of at least {least}, or a list with one of at least 1 for each", is_accepted
    )


def _is_int_or_auto(value: object) -> bool:
    return value == "auto" or _is_int(value, 1)


def _are_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_folder(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


number_or_auto = accepting(
    "None, 'auto', or an int of at least 1", lambda value: value is None or _is_int_or_auto(value)
)
parts_or_auto = accepting("'auto', or an int of at least 1", _is_int_or_auto)
seconds = accepting("None or seconds from 0", lambda value: value is None or _are_seconds(value))
seconds_from_0 = accepting("seconds from 0", _are_seconds)
folder = accepting("None or a folder", lambda value: value is None or _is_folder(value))
flag = accepting("True, False", lambda value: isinstance(value, bool))
yes_no_or_none = accepting("True, False, None", lambda value: value is None or isinstance(value, bool))


def listed(accepted: Iterable[str]) -> str:
    """Return texts in quotes, separated by commas."""
    return ", ".join(repr(item) for item in accepted)


Own = TypeVar("Own", bound="ModeOptions")
_OF_ONE_PROCESS = ("timeline", "dump_dir")


@dataclass(frozen=True, kw_only=True)
class ModeOptions:
    """The base of all modes' options: a frozen value, checked when it is made.

    A type with a ``mode`` is a mode's; the ones without are groups of fields that several modes have.

    Attributes:
        mode: the mode's name.
        why_not: what is said of some options of other modes, ``"is not for ..."`` where it is not here.
        schedule_files: whether ``schedule`` may also be a file.
        schedule: ``"auto"``, or a policy's name, which is applied as asked.
        profile_steps: steps that are measured, after one that is not; 0 measures nothing.  On one device
            ``"auto"`` measures as many as it needs to be sure, no more than 40.
        timeline: folder for ``report.html`` and ``trace.json`` at the end; None writes nothing.
        strict: raise what went wrong; otherwise the stock step runs on and the report says why.

    Raises:
        OptionsError: names the option, its value and what is accepted; of an option of another mode, the
            modes that have it.
    """

    mode: ClassVar[str]
    why_not: ClassVar[Mapping[str, str]] = {}
    schedule_files: ClassVar[bool] = False

    schedule: str = "auto"
    profile_steps: int = option(3, whole_number(0))
    timeline: str | os.PathLike[str] | None = option(None, folder)
    strict: bool = option(False, flag)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "mode" in vars(cls):
            _OF_MODES.append(cls)

    def __new__(cls: type[Own], *args: object, **given: object) -> Own:
        """Refuses names of other modes' options, and values without one: TypeErrors in ``__init__``."""
        if args:
            name = cls.__name__
            raise OptionsError(f"{name}({args[0]!r:.40}): options are given by name, {name}(schedule='auto')")
        for name, value in given.items():
            if name not in cls.defaults():
                raise cls.refusal(name, value)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not (self.schedule_files and is_file(self.schedule)):
            check_schedule(self.mode, self.schedule)
        for item in fields(self):
            if "check" in item.metadata:
                item.metadata["check"](item.name, getattr(self, item.name))
                if item.metadata["of_policy"]:
                    self._check_readers(item.name)

    def _check_readers(self, name: str) -> None:
        value = getattr(self, name)
        readers = [policy.name for policy in POLICIES.values() if name in policy.options]
        if value is not None and self.schedule not in readers:
            raise OptionsError(f"{name}={value} goes with schedule={listed(readers)} only")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the value of each option where the user gives none, by name."""
        return {item.name: item.default for item in fields(cls)}

    @classmethod
    def refusal(cls, name: str, value: object) -> OptionsError:
        """Return the error to raise for an option that this mode does not have."""
        if not (owners := owners_of(name)):
            known = dict.fromkeys(each for mode in (cls, *_OF_MODES) for each in mode.defaults())
            hint = did_you_mean(name, known)
            return OptionsError(f"unknown option {name}={value!r:.80}{hint}; known: {', '.join(known)}")
        clause = cls.why_not.get(name, f"is not for mode={cls.mode!r}")
        return OptionsError(f"{name}={value!r:.80} {clause}; it needs {owners}")

    @property
    def may_fall_back(self) -> bool:
        """A named schedule is applied as asked; only ``"auto"`` may go back to the stock order."""
        return self.schedule == "auto"

    @property
    def policy_options(self) -> dict[str, Any]:
        """Return the values of the schedule's own options; left out where nothing is given."""
        names = [item.name for item in fields(self) if item.metadata.get("of_policy")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def shared(self) -> dict[str, Any]:
        """Return the options that all processes of one training must agree on, as JSON types."""
        values = {name: getattr(self, name) for name in self.defaults() if name not in _OF_ONE_PROCESS}
        return {"mode": self.mode, **values}


# Filled as the modes' options are defined; tf_ooo.modes.table imports them all.
_OF_MODES: list[type[ModeOptions]] = []


def owners_of(name: str) -> str:
    """Return the modes that have an option, ``mode='a' or mode='b'``; empty where none has it."""
    names = sorted(owner.mode for owner in _OF_MODES if name in owner.defaults())
    return " or ".join(f"mode={mode!r}" for mode in names)


def is_default(name: str, value: object) -> bool:
    """Return whether a mode that has this option would do the same without it."""
    return any(value == owner.defaults().get(name, MISSING) for owner in _OF_MODES)


def is_file(schedule: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a schedule is a file's name: a path, or a text with a dot or a slash."""
    if isinstance(schedule, os.PathLike):
        return isinstance(os.fspath(schedule), str)
    return isinstance(schedule, str) and any(sign in schedule for sign in {".", "/", os.sep})


def check_schedule(mode: str, schedule: object) -> None:
    """OptionsError unless ``mode`` trains by the schedule of this name, or it is ``"auto"``."""
    accepted = ("auto", *schedules_of(mode))
    if schedule in accepted:
        return
    if is_file(schedule):
        takers = " or ".join(f"mode={owner.mode!r}" for owner in _OF_MODES if owner.schedule_files)
        raise OptionsError(
            f"schedule={os.fspath(schedule)!r:.80}: a schedule's file is run by {takers} only, not by "
            f"mode={mode!r}; accepted: {listed(accepted)}"
        )
    policy = POLICIES.get(schedule) if isinstance(schedule, str) else None
    if policy is None:
        choice(accepted)("schedule", schedule)
    else:
        needed = " or ".join(f"mode={name!r}" for name in policy.trains)
        raise OptionsError(
            f"schedule={schedule!r} is none of mode={mode!r}: it needs {needed}; accepted: {listed(accepted)}"
        )
