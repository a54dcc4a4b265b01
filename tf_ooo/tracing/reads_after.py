"""Weights that are read or assigned again after their update in the same step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.compat import func_graphs
from tf_ooo.errors import BackendError
from tf_ooo.tracing.variables import names_by_handle

# These leave a variable as it is; those call a function that may read it.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_CALLS = ("Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While")


def refuse_reads_after(updates: Iterable[tuple[Sequence[Any], int]]) -> None:
    """BackendError for what :func:`read_after` finds."""
    again = read_after(updates)
    if again:
        raise BackendError(
            f"train_step {again}; over several devices updates come later than in one step, and "
            "so would this one: train such a model on one device"
        )


def read_after(updates: Iterable[tuple[Sequence[Any], int]]) -> str:
    """Return a weight that is read or assigned after its update, in words; empty: there is none.

    ``updates``: the variables of each, and how many ops the graph that is traced had then.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    for variables, begin in updates:
        handles = names_by_handle(variables)
        for op in operations[begin:]:
            given = op.inputs[:1] if op.type in READS else op.inputs if op.type in _CALLS else ()
            uses = {"reads": given, "assigns": list(func_graphs.written_by_op(op))}
            for use, tensors in uses.items():
                names = [handles[id(tensor)] for tensor in tensors if id(tensor) in handles]
                if names:
                    return f"{use} {names[0]} again after it has applied its gradient (op {op.name})"
    return ""
