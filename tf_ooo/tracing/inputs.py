"""The real shapes of what a step is given, where its graph leaves them open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_ooo.compat import iterators, nests

Seen = tuple[tuple[int, tuple[int | None, ...]], ...]


class Inputs:
    """Looks at the arguments of a step when they are of a kind that it has not seen yet.

    ``elements_per_call``: how many a call takes from an iterator; None: unknown, iterators are not looked
    into.
    """

    def __init__(self, elements_per_call: Callable[[], int] | None = None) -> None:
        self._elements_per_call = elements_per_call
        self._known: set[Any] = set()

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Seen | None]:
        """The arguments to go on with, and the shapes of the tensors; None for shapes seen before.

        An iterator is looked at once for each kind of element, and goes on in an iterator of its own.
        """
        seen = nests.shapes_of((args, kwargs))
        specs = tuple(repr(arg.element_spec) for arg in args if iterators.is_iterator(arg))
        if (seen, specs) in self._known:
            return args, None
        self._known.add((seen, specs))
        if self._elements_per_call is None:
            return args, seen
        out = list(args)
        for place, arg in enumerate(args):
            if iterators.is_iterator(arg):
                elements = iterators.take(arg, self._elements_per_call())
                out[place] = iterators.iterator_over(elements, arg) if elements else arg
                seen += nests.shapes_of(elements)
        return tuple(out), seen
