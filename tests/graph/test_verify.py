from __future__ import annotations

import pytest
import tensorflow as tf
from graphs import flat
from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import VerifyError
from grappler_passes.graph.dependencies import has_side_effects, only_reads
from grappler_passes.passes.verify import verify


@tf.function
def conditional(x):
    return tf.cond(x[0] > 0, lambda: tf.sin(x), lambda: tf.cos(x)) * 2.0


def test_an_edge_that_spreads_deadness_is_found():
    before, _, _ = flat(conditional, tf.TensorSpec([3]))
    after = graph_pb2.GraphDef()
    after.CopyFrom(before)
    sin = next(made.name for made in before.node if made.op == "Sin")
    mul = next(made for made in after.node if made.op == "Mul")
    mul.input.append(f"^{sin}")
    with pytest.raises(VerifyError, match="control edge") as caught:
        verify(before, after)
    assert caught.value.node == mul.name


@tf.function
def loop(x):
    return tf.while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, tf.sin(v)), (0, x))[1] + tf.exp(x)


def test_inputs_from_two_frames_are_found():
    before, _, _ = flat(loop, tf.TensorSpec([3]))
    after = graph_pb2.GraphDef()
    after.CopyFrom(before)
    outside = next(made.name for made in before.node if made.op == "Exp")
    sin = next(made for made in after.node if made.op == "Sin")
    sin.input.append(f"^{outside}")
    with pytest.raises(VerifyError, match="frames"):
        verify(before, after)


@pytest.mark.parametrize(
    "op",
    [
        "AssignVariableOp", "ReadVariableOp", "ResourceApplyAdam", "ResourceScatterAdd", "IteratorGetNext",
        "PrintV2", "HorovodAllreduce", "CollectiveReduceV2", "_Send", "_HostRecv", "RandomUniform",
        "WriteScalarSummary", "StatefulPartitionedCall", "EagerPyFunc", "Assert", "NcclAllReduce",
    ],
)  # fmt: skip
def test_ops_with_side_effects(op):
    assert has_side_effects(op)


def test_a_reduction_may_not_run_twice_once_horovod_is_loaded():
    """Horovod registers its ops, and says that they hold no state."""
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed; run: make horovod")
    has_side_effects.cache_clear()
    assert has_side_effects("HorovodAllreduce")


@pytest.mark.parametrize(
    "op",
    [
        "MatMul", "Identity", "StatelessRandomUniformV2", "TensorListPushBack", "NoOp", "Const",
        "PartitionedCall", "Pack", "Switch", "Merge",
    ],
)  # fmt: skip
def test_ops_without_side_effects(op):
    assert not has_side_effects(op)


def test_reads():
    assert only_reads("ReadVariableOp")
    assert only_reads("ResourceGather")
    assert not only_reads("AssignVariableOp")
