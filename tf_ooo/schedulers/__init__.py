"""Policies: each gives the order of the backward tasks.  One file each, one explicit table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tf_ooo.schedule import Task
from tf_ooo.schedulers.fast_forward import fast_forward
from tf_ooo.schedulers.in_order import in_order

Policy = Callable[[Sequence[int], frozenset[Task]], list[Task]]

POLICIES: Mapping[str, Policy] = {
    "in_order": in_order,
    "fast_forward": fast_forward,
}
"""Layers in the order in which backward reaches them, and the tasks there are: gives their order."""
