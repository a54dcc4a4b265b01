"""Sets of small integers as Python ints: bit i set means i is in the set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def several(bits: int) -> bool:
    """Return whether there is more than one element."""
    return bool(bits & (bits - 1))


def bits_of(bits: int) -> Iterator[int]:
    """The elements, smallest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def memberships(groups: Iterable[Iterable[int]]) -> dict[int, int]:
    """Return the groups of each member: bit i for the i-th."""
    groups_of: dict[int, int] = {}
    for i, members in enumerate(groups):
        for member in members:
            groups_of[member] = groups_of.get(member, 0) | 1 << i
    return groups_of


def union(sets: Iterable[int]) -> int:
    """All elements of all sets."""
    out = 0
    for bits in sets:
        out |= bits
    return out
