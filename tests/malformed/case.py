"""A malformed input, and what may come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Named = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Case:
    """One thing that somebody may have written.

    Attributes:
        area: ``"options"``, ``"costs"`` and so on.
        text: what was written, in a line.
        named: of each group one text must be in the message.
        attempt: does it in an empty folder; raises what its user would see.
    """

    area: str
    text: str
    named: Named
    attempt: Callable[[Path], object]


def written(
    area: str,
    python: str,
    named: Named,
    use: Callable[[Any, Path], object] = lambda value, folder: None,
    **names: Any,
) -> Case:
    """A line of Python in which the names have these values; it is run, and its value is used."""

    def attempt(folder: Path) -> object:
        import tf_ooo

        return use(eval(python, {"tf_ooo": tf_ooo, **names}), folder)

    shown = ", ".join(f"{name}={value!r:.80}" for name, value in names.items() if name in python)
    return Case(area, f"{python} where {shown}" if shown else python, named, attempt)


class Lost(Exception):
    """Something is not as it was, or a good call does not work any more."""


class StockRefuses(Exception):
    """Stock TensorFlow and Keras refuse it, too."""


class CommandFailed(Exception):
    """A command ended with another status than 0: what it printed, and its status."""

    def __init__(self, printed: str, status: int) -> None:
        super().__init__(printed)
        self.printed, self.status = printed, status
