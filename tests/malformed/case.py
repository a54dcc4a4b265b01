"""A malformed input, and what may come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

Value = TypeVar("Value")


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
    named: Sequence[Sequence[str]]
    attempt: Callable[[Path], object]


class Lost(Exception):
    """Something is not as it was, or a good call does not work any more."""


class StockRefuses(Exception):
    """Stock TensorFlow and Keras refuse it, too."""


class CommandFailed(Exception):
    """A command ended with another status than 0: what it printed, and its status."""

    def __init__(self, printed: str, status: int) -> None:
        super().__init__(printed)
        self.printed, self.status = printed, status


class Draw:
    """Chooses from a number: the same number, the same choices."""

    def __init__(self, number: int) -> None:
        self._random = np.random.default_rng(number)

    def below(self, count: int) -> int:
        return int(self._random.integers(count))

    def choice(self, values: Sequence[Value]) -> Value:
        return values[self.below(len(values))]

    def chance(self, probability: float) -> bool:
        return bool(self._random.random() < probability)

    def bytes(self, count: int) -> bytes:
        return self._random.bytes(count)

    def misspelt(self, word: str) -> str:
        """With one letter twice, left out, exchanged, or of another."""
        if len(word) == 1:
            return word * 2
        place = self.below(len(word) - 1)
        before, letters, after = word[:place], word[place : place + 2], word[place + 2 :]
        changed = self.choice((letters[0] * 2 + letters[1], letters[1], letters[::-1], letters[0] + "x"))
        return before + changed + after if changed != letters else word + "s"
