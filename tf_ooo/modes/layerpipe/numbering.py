"""Which of a step's layers given costs are of.

Costs are measured in the order in which graph optimizers leave the layers of a step, which is another one
than that of its trace where branches are side by side (a block and its shortcut).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def in_order_of(costs: Sequence[str], layers: Sequence[str]) -> list[int]:
    """For each of the costs the number of the layer that it is of.

    By names; else by names without the numbers that Keras gives all layers of a kind, which go on where a
    model is made again in one process; where costs have other names, made up by hand, by their places.
    """
    alike: list[Callable[[Sequence[str]], list[str]]] = [_sorted_parts, _ranked]
    for key in alike:
        wanted, own = key(costs), key(layers)
        place = {name: number for number, name in enumerate(own)}
        if len(place) == len(own) and sorted(wanted) == sorted(own):
            return [place[name] for name in wanted]
    return list(range(len(layers)))


def _sorted_parts(names: Sequence[str]) -> list[str]:
    """The names, each with the variables that it lists in sorted order."""
    return [", ".join(sorted(name.split(", "))) for name in names]


def _ranked(names: Sequence[str]) -> list[str]:
    """The ranks of numbers in place of these: dense_7 and dense_9 are dense_0 and dense_1."""
    parts = [[_split(part) for part in name.split("/")] for name in _sorted_parts(names)]
    numbers: dict[str, set[int]] = {}
    for kind, number in (pair for of_name in parts for pair in of_name):
        numbers.setdefault(kind, set()).add(number)
    ranks = {kind: sorted(known) for kind, known in numbers.items()}
    return ["/".join(f"{kind}_{ranks[kind].index(number)}" for kind, number in pairs) for pairs in parts]


def _split(part: str) -> tuple[str, int]:
    kind, _, number = part.rpartition("_")
    return (kind, int(number)) if number != part and number.isdecimal() else (part, 0)
