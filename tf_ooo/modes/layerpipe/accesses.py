"""The ops of a step that read or change variables, and variables that are read within a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tensorflow as tf

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import has_side_effects, only_reads, states_of
from tf_ooo.compat import keras_variables


@dataclass(frozen=True)
class Access:
    """An op with side effects; ``states``: the placeholders of the variables that it reads or changes."""

    name: str
    op: str
    states: frozenset[str]
    writes: bool


def accesses(index: GraphIndex) -> list[Access]:
    """Return the accesses in topological order."""
    return [
        Access(index.names[i], op, frozenset(states_of(index, i)), not only_reads(op))
        for i in index.order
        if has_side_effects(op := index.ops[i])
    ]


def read_where_it_is(
    handle: tf.Tensor, dtype: tf.DType | str, shape: Iterable[int | None] | None
) -> tf.Tensor:
    """Return the present value of a variable, read on its device."""
    with tf.device(handle.device):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(dtype))
    value.set_shape(shape)
    return value


def zeros_on(device: str, info: OutputInfo) -> tf.Variable:
    """Return an untrained variable of zeros, of the shape and type of an op's output."""
    return keras_variables.zeros_on(device, tf.as_dtype(info.dtype), info.shape)
