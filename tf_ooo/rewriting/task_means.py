"""Computes means as sums that are divided, as XLA does: a task that reads one can divide the sum itself."""

from __future__ import annotations

import math
from collections.abc import Container

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import control_inputs, data_inputs, split_input
from grappler_passes.compat.shape_inference import InferredOutputs
from grappler_passes.errors import VerifyError

_SUM, _COUNT = "/tf_ooo_sum", "/tf_ooo_count"
# Sums of half types are rounded before they are divided, which means are not.
_EXACT = frozenset({"float32", "float64"})


def divided_means(
    before: graph_pb2.GraphDef, names: Container[str], outputs: InferredOutputs
) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """Return the graph in which the means of these names are quotients, and the sums' names with the means'.

    A mean of a number of elements that is not known, or of a half type, stays as it is.  ``outputs``: of all
    ops; those of the new ones are added.
    """
    graph_def = graph_protos.copy_of(before)
    counts: dict[str, int] = {}
    for node in [node for node in graph_def.node if node.op == "Mean" and node.name in names]:
        count = _count(node, outputs)
        if count:
            counts[node.name] = count
            total, number = graph_def.node.add(), graph_def.node.add()
            total.CopyFrom(node)
            total.name, total.op = node.name + _SUM, "Sum"
            number.CopyFrom(_number(node, count))
            node.op, node.input[:] = "RealDiv", [total.name, number.name, *control_inputs(node)]
            del node.attr["Tidx"], node.attr["keep_dims"]
    sums = {name + _SUM: name for name in counts}
    outputs.add({**sums, **{name + _COUNT: name for name in counts}})
    _check(before, graph_def, counts)
    return graph_def, sums


def _count(mean: node_def_pb2.NodeDef, outputs: InferredOutputs) -> int | None:
    """Return of how many numbers it is the mean, if that is known and a quotient is the same."""
    (read, port), axes = map(split_input, data_inputs(mean))
    info, places = outputs[read][port], outputs.constant(*axes)
    if info.dtype not in _EXACT or info.shape is None or places is None:
        return None
    sizes = [info.shape[place] for place in {int(place) % len(info.shape) for place in np.ravel(places)}]
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _number(mean: node_def_pb2.NodeDef, count: int) -> node_def_pb2.NodeDef:
    """Return the constant that a mean's sum is divided by."""
    number = node_def_pb2.NodeDef(name=mean.name + _COUNT, op="Const", device=mean.device)
    dtype = mean.attr["T"].type
    number.attr["dtype"].type = dtype
    number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(count, dtype))
    return number


def _check(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, counts: dict[str, int]) -> None:
    """Raise VerifyError unless each mean is a quotient of what it was the mean of, and no more is new."""
    now = {node.name: node for node in after.node}
    for was in (node for node in before.node if node.name in counts):
        total, number = now[was.name + _SUM], now[was.name + _COUNT]
        quotient, mean = now[was.name], node_def_pb2.NodeDef()
        mean.CopyFrom(total)
        mean.name, mean.op = was.name, "Mean"
        reads = [total.name, number.name, *control_inputs(was)]
        divides = quotient.op == "RealDiv" and list(quotient.input) == reads
        if mean != was or not divides or number != _number(was, counts[was.name]):
            raise VerifyError(was.name, "attributes", "is not the quotient that its mean was")
    if len(now) != len(before.node) + 2 * len(counts):
        raise VerifyError("?", "new nodes", "there are others than sums and numbers of elements")
