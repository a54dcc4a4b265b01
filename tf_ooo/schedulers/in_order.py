"""dW of a layer as early as possible: the order with the lowest peak of memory."""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.schedule import Task


def in_order(backward_layers: Sequence[int], tasks: frozenset[Task]) -> list[Task]:
    """dO and dW layer by layer; a layer's stored input and dO can be freed at once.

    Args:
        backward_layers: layer indices in the order in which the dO chain reaches them.
        tasks: the tasks that have ops.
    """
    order = [Task(kind, layer) for layer in backward_layers for kind in ("dO", "dW")]
    return [task for task in order if task in tasks]
