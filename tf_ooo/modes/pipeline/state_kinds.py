"""Finds by comparing how states that a forward pass assigns follow from the micro-batches of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tf_ooo.tracing.states import IN_TURN, MEAN, ONCE, SUM

# A difference beside the state's change: rounding makes 1e-7 to 1e-5 of it.
_ROUNDING = 1e-3
# States are moved by so much, upwards, to see what becomes of them: many begin as zeros.
_MOVED = 0.05

_KINDS = (ONCE, MEAN, SUM, IN_TURN)

States = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StateKinds:
    """States by path: how each follows from micro-batches, and those that do not.

    Of the latter ``used`` are those on which the loss or a gradient depends, now or in a later step.
    ``metrics``: names of those that say of two micro-batches something else than of both in one.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    unlike: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assigned:
    """The states before a step, after it on two micro-batches in one, and after it on each of them.

    ``in_turn``: a state by its name, after the second one where it was before that what the first one left.
    """

    before: States
    both: States
    first: States
    second: States
    in_turn: Callable[[str], np.ndarray]

    def of(self, name: str) -> list[np.ndarray]:
        """Return one state before the step, after it on both, on the first, and on the second."""
        return [np.asarray(states[name]) for states in (self.before, self.both, self.first, self.second)]


def state_kinds(assigned: Sequence[Assigned], used: Collection[str]) -> StateKinds:
    """Find what holds for all that was ``assigned``; ``used``: names of states that training depends on."""
    kinds: dict[str, str] = {}
    unlike = []
    for name in assigned[0].both if assigned else ():
        # If moved states make something else than numbers, the other samples tell.
        finite = [each for each in assigned if all(map(_is_finite, each.of(name)))]
        kind = next((kind for kind in _KINDS if all(_holds(kind, each, name) for each in finite)), "")
        # Else there is one update a step where that can be: of an average of extremes, say.
        kinds[name] = kind or (MEAN if np.asarray(assigned[0].before[name]).dtype.kind == "f" else IN_TURN)
        if not kind or (kind == IN_TURN and name in used):
            unlike.append(name)
    return StateKinds(kinds, tuple(unlike), tuple(name for name in unlike if name in used))


def _is_finite(values: np.ndarray) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _holds(kind: str, assigned: Assigned, name: str) -> bool:
    """Return whether a state follows so."""
    before, both, first, second = numbers = assigned.of(name)
    if kind == ONCE:
        return np.array_equal(both, first) and np.array_equal(both, second)
    if before.dtype.kind not in "fiu":
        return kind == IN_TURN and np.array_equal(both, assigned.in_turn(name))
    old, new, one, other = (values.astype(np.float64) for values in numbers)
    if kind == IN_TURN:
        expected = assigned.in_turn(name).astype(np.float64)
    else:
        expected = (one + other) / 2 if kind == MEAN else one + other - old
    if before.dtype.kind != "f":
        return kind != MEAN and np.array_equal(new, expected)
    rounding = 8 * np.finfo(before.dtype).eps * max(np.abs(each).max(initial=0.0) for each in (old, new))
    difference = float(np.abs(new - expected).max(initial=0.0))
    # A state that begins far away changes by much, whatever its parts say.
    sizes = [float(np.abs(change).max(initial=0.0)) for change in (new - old, one - other)]
    return bool(difference <= _ROUNDING * min(sizes) + rounding)


def moved(states: States) -> States:
    """States of numbers a little larger: their decay is seen."""
    numbers = np.random.default_rng(0)
    return {
        name: (value + _MOVED * np.abs(numbers.standard_normal(value.shape))).astype(value.dtype)
        for name, value in states.items()
        if value.dtype.kind == "f"
    }


def in_steps(steps: int, now: np.ndarray, once: np.ndarray, twice: np.ndarray) -> np.ndarray:
    """Return a state so many steps later, told from two: each step's change is one share of that before it.

    So counts, ramps, decays and moving averages go on; what has two values stays as it is after two steps.
    """
    if now.dtype.kind not in "fiu":
        return twice
    old, new, newer = (np.asarray(values, np.float64) for values in (now, once, twice))
    change, next_change = new - old, newer - new
    share = np.clip(np.divide(next_change, change, out=np.zeros_like(old), where=change != 0), 0.0, 1.0)
    falling = np.minimum(share, 1.0 - 1e-9)
    value = old + change * np.where(share < 1.0, (1.0 - falling**steps) / (1.0 - falling), steps)
    if now.dtype.kind in "iu":
        limits = np.iinfo(now.dtype)
        value = np.clip(np.rint(value), limits.min, limits.max)
    return value.astype(now.dtype)


@contextlib.contextmanager
def set_to(variables: Mapping[str, Any], values: States) -> Iterator[None]:
    """Inside the block the variables have these values; those without one stay as they are."""
    before = {name: variable.numpy() for name, variable in variables.items()}
    try:
        for name, value in values.items():
            variables[name].assign(value)
        yield
    finally:
        for name, value in before.items():
            variables[name].assign(value)
