"""Reads a schedule in a file: errors name the file and the line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tf_ooo.errors import ScheduleError, unreadable
from tf_ooo.planning.model.schedule import Schedule

_LANE = re.compile(r"\blane (\d+) (\d+)")
_TASK = re.compile(r"\b(?:F|dO|dW|comm|U):(\d+)")
_LINE = re.compile(r"line \d+: ")


@dataclass(frozen=True)
class ScheduleFile:
    """Holds a file that was read: its name, its text, and the schedule in it."""

    path: str
    text: str
    schedule: Schedule

    def error(self, message: str, begins: str = "") -> ScheduleError:
        """Return a ScheduleError that names the file, and the first line that starts with ``begins``."""
        number = _line_that_begins(self.text, begins) if begins else 0
        return ScheduleError(f"{self.path}: {f'line {number}: ' if number else ''}{message}")

    def located(self, error: ScheduleError) -> ScheduleError:
        """Return the same error with the file, and the line of the lane or stage that it is about."""
        return ScheduleError(f"{self.path}: {_with_line(self.text, str(error))}")


def read_schedule(path: str | os.PathLike[str]) -> ScheduleFile:
    """Read :meth:`Schedule.to_text` text.  ScheduleError names the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: cannot be read: {unreadable(error)}") from error
    try:
        return ScheduleFile(str(path), text, Schedule.from_text(text))
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {_with_line(text, str(error))}") from error


def _with_line(text: str, message: str) -> str:
    """Return the message with the number of its line in front, unless it begins with one."""
    number = 0
    if _LINE.match(message):
        return message
    if lane := _LANE.search(message):
        number = _line_that_begins(text, f"lane {lane[1]} {lane[2]}")
    elif task := _TASK.search(message):
        pattern = re.compile(rf"lane .*\b(?:F|dO|dW|comm|U):{task[1]}\b")
        number = _first_line(text, lambda line: bool(pattern.match(line.split("#", 1)[0].strip())))
    return f"line {number}: {message}" if number else message


def _line_that_begins(text: str, begins: str) -> int:
    words = begins.split()
    return _first_line(text, lambda line: line.replace(":", " ").split()[: len(words)] == words)


def _first_line(text: str, wanted: Callable[[str], bool]) -> int:
    """Return the number of the first line that is wanted; 0: none."""
    return next((number for number, line in enumerate(text.split("\n"), 1) if wanted(line)), 0)
