"""Attributes of all ops that are made in a block: which step they belong to, what they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2

from grappler_passes.analysis.steps import SUM_ATTR, TURN_ATTR

# On the communications of a gradient that travels in slices: which of them.
PART_ATTR = "_ooo_part"
# Grappler's arithmetic optimizer writes this on sums that it has looked at: with it, a chain of sums stays a
# chain. Else it becomes one AddN, which keeps the gradients of all micro-batches alive to the end.
_LEAVE_SUMS = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def _marked(attributes: Mapping[str, int | bool]) -> AbstractContextManager[None]:
    values = {
        name: attr_value_pb2.AttrValue(**{"b" if isinstance(value, bool) else "i": value})
        for name, value in attributes.items()
    }
    scope: AbstractContextManager[None] = tf.compat.v1.get_default_graph()._attr_scope(values)
    return scope


@contextlib.contextmanager
def numbered_step(number: int, attribute: str, scope: str) -> Iterator[None]:
    """Ops made inside say which step they belong to: by an attribute, and by their scope if one is given.

    Also inside of another's.  TensorFlow's graph optimizers are not blind to names: in a scope the same step
    may differ in the last bit.
    """
    named = tf.name_scope(f"{scope}{number}/") if scope else contextlib.nullcontext()
    with _marked({attribute: number}), named:
        yield


def numbered_turn(number: int) -> AbstractContextManager[None]:
    """Ops made inside say after how many updates of their step they come."""
    return _marked({TURN_ATTR: number})


def numbered_part(number: int) -> AbstractContextManager[None]:
    """Ops made inside say which slice they belong to; of no use where ops run at once."""
    return contextlib.nullcontext() if tf.executing_eagerly() else _marked({PART_ATTR: number})


def marked_sums() -> AbstractContextManager[None]:
    """Ops made inside are sums of gradients, which Grappler leaves as they are."""
    return _marked({SUM_ATTR: True, _LEAVE_SUMS: True})


def leave_sums(graph_def: graph_pb2.GraphDef) -> None:
    """Marks all sums of a graph: Grappler sorts what it joins by names, which gives each copy other bits."""
    for node in graph_def.node:
        if node.op in ("Add", "AddV2", "AddN"):
            node.attr[_LEAVE_SUMS].b = True
