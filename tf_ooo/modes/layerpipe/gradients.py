"""What optimizers are given while a step is traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tf_ooo import compat
from tf_ooo.compat.layerpipe import marked_gradient
from tf_ooo.errors import BackendError
from tf_ooo.tracing.collecting import ops_so_far


@contextlib.contextmanager
def updates_seen(optimizers: Sequence[Any], marked: bool) -> Iterator[list[tuple[list[Any], int]]]:
    """Inside the block each optimizer may apply gradients once.

    Gives a list that grows by the variables of each update, and how many ops the graph had after it.

    Args:
        optimizers: of a model; one inside another (loss scaling) is called by that one.
        marked: the gradients that they are given are :func:`tf_ooo.compat.layerpipe.marked_gradient`.

    Raises:
        BackendError: one applies gradients twice.
    """
    seen = _Seen(marked)
    for optimizer in optimizers:
        compat.shadow_update(optimizer, functools.partial(seen.wrap, optimizer))
    try:
        yield seen.updates
    finally:
        for optimizer in optimizers:
            compat.unshadow_update(optimizer)


class _Seen:
    def __init__(self, marked: bool) -> None:
        self._marked = marked
        self.updates: list[tuple[list[Any], int]] = []
        self._done: set[int] = set()
        self._inside = False

    def wrap(self, optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
        def apply_once(grads: Any, trainable_variables: Any = None) -> Any:
            if self._inside:
                return apply(grads, trainable_variables)
            if id(optimizer) in self._done:
                raise BackendError(
                    "train_step applies gradients twice with one optimizer; mode='layerpipe' applies them "
                    "once a step: give each part of the model its own optimizer, or take another mode"
                )
            self._done.add(id(optimizer))
            given = list(grads)
            variables = compat.variables_to_apply(optimizer, trainable_variables)
            if self._marked:
                given = [marked_gradient(*one) for one in zip(given, variables, strict=True)]
            self._inside = True
            try:
                return apply(given, trainable_variables)
            finally:
                self._inside = False
                self.updates.append((variables, ops_so_far()))

        return apply_once
