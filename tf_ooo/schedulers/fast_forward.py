"""Gradient fast-forwarding: the whole dO chain, then the dW (EuroSys 2022, section on pipelines)."""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.schedule import Schedule, Task
from tf_ooo.schedulers.common import one_worker
from tf_ooo.schedulers.problem import Problem


def make(problem: Problem) -> Schedule:
    """All dO first; then dW, lowest layer first, because the next forward needs its weights first."""
    layers = range(len(problem.layers))
    backward = [Task("dO", layer) for layer in reversed(layers)] + [Task("dW", layer) for layer in layers]
    return one_worker("fast_forward", problem, backward, [Task("comm", layer) for layer in layers])


def backward_order(backward_layers: Sequence[int], tasks: frozenset[Task]) -> list[Task]:
    """All dO first; then dW, lowest layer first, because the next forward needs its weights first.

    Args:
        backward_layers: layer indices in the order in which the dO chain reaches them.
        tasks: the tasks that have ops.
    """
    order = [Task("dO", layer) for layer in backward_layers]
    order += [Task("dW", layer) for layer in sorted(backward_layers)]
    return [task for task in order if task in tasks]
