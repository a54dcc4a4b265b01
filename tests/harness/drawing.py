"""Draws a case from a number by hypothesis, which also finds the simplest case that fails in the same way."""

from __future__ import annotations

import contextlib
import functools
import random
import unittest
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

Case = TypeVar("Case")
Value = TypeVar("Value")
# No case takes as many bytes of chance.
BYTES = 8192
# A simpler case is looked for so often at most.
TRIALS = 200


_below = functools.cache(lambda count: st.integers(0, count - 1))


class Draw:
    """Chance that hypothesis can make simpler: the first of a choice, zero and no are the simplest."""

    def __init__(self, draw: Callable[[Any], Any], number: int) -> None:
        self._draw, self.number = draw, number

    def below(self, count: int) -> int:
        value: int = self._draw(_below(count))
        return value

    def part(self, function: Callable[[], Value]) -> Value:
        """Calls the function; hypothesis may take away all that it draws at once."""
        value: Value = self._draw(st.builds(function))
        return value

    def choice(self, values: Sequence[Value]) -> Value:
        return values[self.below(len(values))]

    def chance(self, probability: float) -> bool:
        return self.below(1000) >= 1000 * (1 - probability)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.below(1000) / 999

    def bytes(self, count: int) -> bytes:
        return random.Random(self.below(2**32)).randbytes(count)

    def in_turn(self, values: Sequence[Value], turn: int | None = None) -> Value:
        """Each of the values once in as many numbers, in an order of chance; the simplest is the first."""
        if not self.below(2**16):
            return values[0]
        turn, place = divmod(self.number if turn is None else turn, len(values))
        return random.Random(f"{turn} {len(values)}").sample(values, len(values))[place]

    def misspelt(self, word: str) -> str:
        """With one letter twice, left out, exchanged, or of another."""
        if len(word) == 1:
            return word * 2
        place = self.below(len(word) - 1)
        before, letters, after = word[:place], word[place : place + 2], word[place + 2 :]
        changed = self.choice((letters[0] * 2 + letters[1], letters[1], letters[::-1], letters[0] + "x"))
        return before + changed + after if changed != letters else word + "s"


class Cases(Generic[Case]):
    """Cases that are drawn from numbers: the same number, the same case."""

    def __init__(self, case_of: Callable[[Draw], Case]) -> None:
        self._case_of = case_of
        self._last: list[Case] = []
        self._number = 0
        self._keep = self._test(self._last.append)

    def drawn(self, number: int) -> Case:
        """The case of that number."""
        self._start(self._keep, number)
        return self._last.pop()

    def minimal(self, number: int, fails: Callable[[Case], bool]) -> Case:
        """The simplest case to which hypothesis can bring the one of that number while it fails."""
        known: dict[str, bool] = {}
        smallest = [self.drawn(number)]

        def judge(case: Case) -> None:
            if repr(case) not in known:
                known[repr(case)] = len(known) < TRIALS and fails(case)
            if known[repr(case)]:
                smallest.append(case)
                raise AssertionError(repr(case))

        test = self._test(judge)
        for run in (lambda: self._start(test, number), test):
            with contextlib.suppress(AssertionError, unittest.SkipTest):  # skipped: nothing fails any more
                run()
        return smallest[-1]

    def _test(self, judge: Callable[[Case], None]) -> Any:
        """A test of hypothesis: it keeps what fails, and begins with that when it is called."""

        @settings(
            database=InMemoryExampleDatabase(),
            phases=(Phase.reuse, Phase.shrink),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(st.composite(lambda draw: self._case_of(Draw(draw, self._number)))())
        def test(case: Case) -> None:
            judge(case)

        # A number is brought to the same case each time; hypothesis.seed() would take the database away.
        test._hypothesis_internal_use_seed = 1  # type: ignore[attr-defined]
        return test

    def _start(self, test: Any, number: int) -> None:
        self._number = number
        test.hypothesis.fuzz_one_input(random.Random(number).randbytes(BYTES))
