"""An upgrade may break what TensorFlow has registered about ops."""

from __future__ import annotations

import tensorflow as tf

from grappler_passes.compat import op_types


def test_op_def():
    assert op_types.op_def("MatMul").input_arg[0].name == "a"
    assert op_types.op_def("NoSuchOpAnywhere") is None


def test_is_stateful():
    assert op_types.is_stateful("AssignVariableOp"), "op_def_registry: state is no longer told"
    assert op_types.is_stateful("NoSuchOpAnywhere"), "an unknown op must count as stateful"
    assert not op_types.is_stateful("MatMul")


def test_is_known_op():
    assert op_types.is_known_op("MatMul")
    assert not op_types.is_known_op("NoSuchOpAnywhere")


def test_has_reference_inputs():
    assert op_types.has_reference_inputs("Assign"), (
        "OpDef.ArgDef.is_ref: writes to old variables are not seen"
    )
    assert not op_types.has_reference_inputs("RefSwitch"), "control flow only hands a variable on"
    assert not op_types.has_reference_inputs("MatMul")


def test_resource_inputs():
    assert op_types.resource_inputs("AssignVariableOp") == (0,)
    assert op_types.resource_inputs("ResourceApplyMomentum") == (0, 1), "slots are no longer found"
    assert op_types.resource_inputs("MatMul") == op_types.resource_inputs("NoSuchOpAnywhere") == ()


def test_keeps_random_state():
    assert op_types.keeps_random_state("RandomUniform"), "a copy of such a step would draw the same numbers"
    assert not op_types.keeps_random_state("StatelessRandomUniformV2")
    assert not op_types.keeps_random_state("NoSuchOpAnywhere")


def test_attribute_names():
    assert {"T", "strides", "padding"} <= op_types.attribute_names("Conv2D")
    assert op_types.attribute_names("NoSuchOp") == frozenset()


def test_allows_types():
    """If the fused op learns bfloat16, it need not be taken apart any more."""
    for op, dtype, allowed in (
        ("Conv2D", tf.bfloat16, True),
        ("_FusedConv2D", tf.float32, True),
        ("_FusedConv2D", tf.bfloat16, False),
        ("NoSuchOp", tf.bfloat16, True),
    ):
        node = tf.compat.v1.NodeDef(name="n", op=op)
        node.attr["T"].type = dtype.as_datatype_enum
        assert op_types.allows_types(node) == allowed, (op, dtype)


def test_output_names():
    graph = tf.Graph()
    with graph.as_default():
        tf.split(tf.zeros([4]), 2, name="parts")
        tf.raw_ops.FusedBatchNormV3(
            x=tf.zeros([1, 2, 2, 1]), scale=[1.0], offset=[1.0], mean=[], variance=[], name="norm"
        )
        tf.raw_ops.IdentityN(input=[tf.zeros([]), tf.zeros([], tf.int64)], name="both")
    nodes = {node.name: node for node in graph.as_graph_def().node}
    assert op_types.output_names(nodes["parts"]) == ["parts:output:0", "parts:output:1"]
    assert op_types.output_names(nodes["both"]) == ["both:output:0", "both:output:1"]
    names = op_types.output_names(nodes["norm"])
    assert names[:2] == ["norm:y:0", "norm:batch_mean:0"], "OpDef.output_arg: outputs have other names"
    assert len(names) == 6
    assert op_types.output_names(tf.compat.v1.NodeDef(op="NoOp")) == []


def test_what_communicates():
    assert all(map(op_types.is_communication, ("HorovodAllreduce", "CollectiveReduceV2", "_Recv")))
    assert not op_types.is_communication("MatMul")
