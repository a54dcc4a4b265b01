"""Whether a gradient comes out of an allreduce that the user's own train step has made."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_ooo.compat import func_graphs

_ALLREDUCE = (
    "HorovodAllreduce", "HorovodGroupedAllreduce", "HorovodAllgather", "CollectiveReduce", "CollectiveGather",
)  # fmt: skip
# What may stand between an allreduce and apply without changing the shape: casts, scales, clips.
_PASS_ON = {
    "AddN", "Cast", "ClipByValue", "Identity", "IdentityN", "If", "Maximum", "Minimum", "Mul",
    "PartitionedCall", "RealDiv", "Select", "SelectV2", "StatefulPartitionedCall", "StatelessIf",
}  # fmt: skip
_DEEPEST = 12


def already_averaged(gradient: Any) -> bool:
    """Follows the gradient back through ops of its own shape to a communication; False if run eagerly.

    The communication of a synchronized BatchNorm lies behind ops that are not passed here.
    """
    tensor = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if not hasattr(tensor, "graph") or not hasattr(tensor, "op"):
        return False
    seen: set[str] = set()
    todo = [(tensor, 0)]
    while todo:
        here, depth = todo.pop()
        op = here.op
        if op.type.startswith(_ALLREDUCE) or _calls_allreduce(op):
            return True
        if op.type not in _PASS_ON or op.name in seen or depth >= _DEEPEST:
            continue
        seen.add(op.name)
        inputs = [op.inputs[here.value_index]] if op.type == "IdentityN" else op.inputs
        todo += [(before, depth + 1) for before in inputs if _same_shape(before, here)]
    return False


def _same_shape(before: Any, after: Any) -> bool:
    return before.dtype.is_floating and bool(before.shape.is_compatible_with(after.shape))


def _calls_allreduce(op: Any) -> bool:
    """A branch or a called function that communicates: Horovod's tape has a ``tf.cond`` for each."""
    if op.type not in ("If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall"):
        return False
    return any(kind.startswith(_ALLREDUCE) for kind in func_graphs.ops_called_by(op))
