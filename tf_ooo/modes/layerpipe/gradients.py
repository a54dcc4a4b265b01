"""What optimizers are given while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tf_ooo.compat import op_marks
from tf_ooo.errors import BackendError
from tf_ooo.tracing.intercepting import Update, intercepted, ops_so_far


@contextlib.contextmanager
def updates_seen(optimizers: Sequence[Any], marked: bool) -> Iterator[list[tuple[list[Any], int]]]:
    """Inside the block each optimizer may apply gradients once.

    Gives a list that grows by the variables of each update, and how many ops the graph had after it.

    Args:
        optimizers: of a model; one inside another (loss scaling) is called by that one.
        marked: the gradients that they are given are :func:`tf_ooo.compat.op_marks.marked_gradient`.

    Raises:
        BackendError: one applies gradients twice.
    """
    updates: list[tuple[list[Any], int]] = []
    updated: set[int] = set()

    def apply_once(update: Update) -> Any:
        if id(update.optimizer) in updated:
            raise BackendError(
                "train_step applies gradients twice with one optimizer; mode='layerpipe' applies them "
                "once a step: give each part of the model its own optimizer, or take another mode"
            )
        updated.add(id(update.optimizer))
        grads = update.grads
        if marked:
            grads = [op_marks.marked_gradient(*pair) for pair in zip(grads, update.variables, strict=True)]
        try:
            return update.proceed(grads)
        finally:
            updates.append((update.variables, ops_so_far()))

    with intercepted(optimizers, apply_once):
        yield updates
