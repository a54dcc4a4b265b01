"""Judges whether what a user sees of a malformed input is one clear line that names it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from tests.malformed.case import CommandFailed

MOST_CHARACTERS = 600
# Python says this when something went wrong inside, or shows addresses of objects.
INNER = re.compile(
    r"Traceback|NoneType|object has no attribute|object is not|positional argument|unexpected keyword|"
    r"unsupported operand|not supported between|not iterable|out of range: |object at 0x|index out of"
    r"|literal for int|could not convert|Errno"
)


def fault_of(error: BaseException, named: Sequence[Sequence[str]]) -> str:
    """Say what is wrong with an error, as its user sees it; empty: nothing."""
    if isinstance(error, CommandFailed):
        return fault_of_command(error) or fault_of_text(shown(error), named)
    from tf_ooo import OOOError

    if not isinstance(error, (OOOError, click.UsageError)):
        return f"raised as {type(error).__name__}"
    return fault_of_text(str(error), named)


def shown(error: BaseException) -> str:
    """The message: of a command, what stands behind "Error: " and not the usage before it."""
    if not isinstance(error, CommandFailed):
        return str(error)
    return error.printed.rpartition("Error: ")[2].strip()


def fault_of_command(error: CommandFailed) -> str:
    if "Traceback" in error.printed:
        return "a traceback"
    if error.status not in (1, 2):
        return f"ended with {error.status}"
    if "Error: " not in error.printed:
        return "no line says Error:"
    return ""


def fault_of_text(text: str, named: Sequence[Sequence[str]]) -> str:
    lines = text.splitlines()
    if not lines:
        return "says nothing"
    if len(lines) > 2:
        return f"{len(lines)} lines"
    if len(text) > MOST_CHARACTERS:
        return f"{len(text)} characters"
    inner = INNER.search(text)
    if inner is not None:
        return f"says what only the code knows: {inner[0]!r}"
    for group in named:
        if not any(part.lower() in text.lower() for part in group):
            return f"does not name {' or '.join(map(repr, group))}"
    return ""
