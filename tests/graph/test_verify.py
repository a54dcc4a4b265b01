from __future__ import annotations

import pytest
import tensorflow as tf
from graphs import flat, node
from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import VerifyError
from grappler_passes.graph.dependencies import has_side_effects, only_reads
from grappler_passes.passes.verify import verify


def step():
    graph = graph_pb2.GraphDef()
    node(graph, "handle", "_Arg")
    node(graph, "x", "_Arg")
    node(graph, "read", "ReadVariableOp", "handle")
    node(graph, "mul", "Mul", "read", "x")
    node(graph, "group", "NoOp", "^mul")
    node(graph, "new", "Identity", "x", "^group")
    node(graph, "write", "AssignVariableOp", "handle", "new")
    node(graph, "add", "Add", "mul", "x")
    node(graph, "out", "_Retval", "add", "^write")
    return graph


def changed(*changes):
    graph = step()
    for change in changes:
        change({made.name: made for made in graph.node}, graph)
    return graph


def drop(name):
    def change(nodes, graph):
        graph.node.remove(nodes[name])

    return change


def inputs(name, *texts):
    def change(nodes, graph):
        del nodes[name].input[:]
        nodes[name].input.extend(texts)

    return change


@pytest.mark.parametrize(
    ("changes", "name", "rule"),
    [
        ([inputs("mul", "read", "out")], "mul", "acyclic"),
        ([inputs("mul", "read", "nobody")], "mul", "structure"),
        ([inputs("mul", "^read", "x")], "mul", "structure"),
        ([lambda nodes, graph: node(graph, "x")], "x", "structure"),
        ([drop("out")], "out", "kept"),
        ([drop("write"), inputs("out", "add")], "write", "kept"),
        ([drop("add"), inputs("out", "mul")], "add", "kept"),
        ([lambda nodes, graph: setattr(nodes["mul"], "op", "Div")], "mul", "op"),
        ([lambda nodes, graph: setattr(nodes["mul"].attr["T"], "type", 2)], "mul", "attributes"),
        ([inputs("mul", "x", "read")], "mul", "data inputs"),
        # Seen through the Identity it is the same tensor, but the order is lost.
        ([inputs("write", "handle", "x")], "write", "side effects"),
        ([inputs("x", "^handle")], "x", "control edge"),
        ([inputs("new", "x")], "write", "side effects"),
    ],
)
def test_broken_rules_name_node_and_rule(changes, name, rule):
    with pytest.raises(VerifyError) as caught:
        verify(step(), changed(*changes))
    assert (caught.value.node, caught.value.rule) == (name, rule)


def test_allowed_changes():
    verify(step(), step())
    verify(step(), changed(inputs("add", "mul", "x", "^new")))
    # The gate may go where another edge keeps the read before the write.
    verify(step(), changed(inputs("new", "x"), drop("group"), inputs("write", "handle", "new", "^read")))
    verify(step(), changed(drop("add"), inputs("out", "mul", "^write")), replaced={"add", "out"})


def test_side_effects_may_not_be_replaced_nor_fetches_dropped():
    with pytest.raises(VerifyError, match="write"):
        verify(step(), changed(inputs("write", "handle", "mul")), replaced={"write"})
    with pytest.raises(VerifyError, match="group"):
        verify(step(), changed(drop("group"), inputs("new", "x", "^read")), fetches=["group"])


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
        "AssignVariableOp",
        "ReadVariableOp",
        "ResourceApplyAdam",
        "ResourceScatterAdd",
        "IteratorGetNext",
        "PrintV2",
        "HorovodAllreduce",
        "CollectiveReduceV2",
        "_Send",
        "_HostRecv",
        "RandomUniform",
        "WriteScalarSummary",
        "StatefulPartitionedCall",
        "EagerPyFunc",
        "Assert",
        "NcclAllReduce",
    ],
)
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
        "MatMul",
        "Identity",
        "StatelessRandomUniformV2",
        "TensorListPushBack",
        "NoOp",
        "Const",
        "PartitionedCall",
        "Pack",
        "Switch",
        "Merge",
    ],
)
def test_ops_without_side_effects(op):
    assert not has_side_effects(op)


def test_reads():
    assert only_reads("ReadVariableOp")
    assert only_reads("ResourceGather")
    assert not only_reads("AssignVariableOp")
