"""Sets of small integers as Python ints: bit i set means i is in the set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def several(bits: int) -> bool:
    """More than one element."""
    return bool(bits & (bits - 1))


def bits_of(bits: int) -> Iterator[int]:
    """The elements, smallest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def union(sets: Iterable[int]) -> int:
    """All elements of all sets."""
    out = 0
    for bits in sets:
        out |= bits
    return out
