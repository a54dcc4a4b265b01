"""Runs each dW as early as possible: the stock order, and the order with the lowest memory peak."""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.planning.building.step_model import one_worker
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies.policy import Policy


def make(problem: Problem) -> Schedule:
    """Return F upwards, then dO and dW layer by layer downwards; several devices are data parallel workers.

    Gradients are communicated in the order in which they are made, and the next step begins when all
    updates are done: stock Horovod, without its fusion, cycle time and negotiation.  Option
    ``barrier=False``: a layer's next forward waits for its own update only (reverse first-k with k=0).
    """
    barrier = problem.flag("barrier", True)
    down = range(len(problem.layers) - 1, -1, -1)
    sent = [Task("comm", layer) for layer in down]
    return one_worker("in_order", problem, _order(down), sent, barrier=barrier)


def _order(backward_layers: Sequence[int]) -> list[Task]:
    return [Task(kind, layer) for layer in backward_layers for kind in ("dO", "dW")]


def backward_order(backward_layers: Sequence[int], tasks: frozenset[Task]) -> list[Task]:
    """Return dO and dW layer by layer, so that a layer's stored input and dO can be freed at once."""
    return [task for task in _order(backward_layers) if task in tasks]


POLICY = Policy(
    "in_order", ("single_device", "data_parallel"), make, ("barrier",), backward_order=backward_order
)
