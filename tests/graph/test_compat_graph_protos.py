"""GraphDefs and what stands in their nodes: what an upgrade breaks."""

from __future__ import annotations

import pytest
import tensorflow as tf

from grappler_passes.compat import graph_protos, runtime
from tests.graph.compat_models import described, run_with, square_step
from tf_ooo.compat import tf_functions


def test_tensor_proto():
    assert tf.make_ndarray(graph_protos.tensor_proto("text")) == b"text"
    assert not tf.make_ndarray(graph_protos.tensor_proto(False))


def test_zero_of():
    for value in (2.0, 3, True, "text"):
        wanted = tf.constant(value)
        zero = graph_protos.zero_of(wanted.dtype.as_datatype_enum)
        assert tf.make_ndarray(zero) == tf.zeros([], wanted.dtype).numpy()


def test_parse_graph_def():
    _, function = square_step()
    graph_def = function.graph.as_graph_def()
    parsed = graph_protos.parse_graph_def(graph_def.SerializeToString())
    assert parsed == graph_def
    with pytest.raises(Exception, match="(?i)pars|decod"):
        graph_protos.parse_graph_def(b"no graph")


def test_is_graph_def():
    assert graph_protos.is_graph_def(tf.compat.v1.GraphDef())
    assert not graph_protos.is_graph_def(b"")
    assert not graph_protos.is_graph_def(tf.compat.v1.NodeDef())


def test_keep_colocations():
    node = tf.compat.v1.NodeDef()
    node.attr["_class"].list.s.extend([b"loc:@here", b"loc:@gone"])
    graph_protos.keep_colocations(node, lambda name: name == "here")
    assert list(node.attr["_class"].list.s) == [b"loc:@here"]
    graph_protos.keep_colocations(node, lambda name: False)
    assert "_class" not in node.attr, "an empty list is refused by tf.import_graph_def"


def test_copies():
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="a", op="NoOp")
    graph_def.library.function.add().signature.name = "f"
    graph_def.versions.producer = 7
    copy = graph_protos.copy_of(graph_def)
    assert copy == graph_def
    copy.node[0].name = "b"
    other = graph_protos.with_nodes(graph_def, iter(copy.node))
    assert [node.name for node in other.node] == ["b"]
    assert (other.library, other.versions) == (graph_def.library, graph_def.versions)
    other.node[0].name = "c"
    assert (graph_def.node[0].name, copy.node[0].name) == ("a", "b")


def test_inline_graph_def():
    weight, function = square_step()
    graph_def, fetches = runtime.graph_def_of(function)
    flat = graph_protos.inline_graph_def(graph_def, fetches)
    ops = [node.op for node in flat.node]
    assert "PartitionedCall" not in ops, "Grappler's function optimizer no longer inlines calls"
    assert "Switch" in ops, "control flow is no longer lowered to Switch and Merge"
    assert not {"If", "StatelessIf"} & set(ops)
    assert described(flat) == [{"name": "weight", "trainable": True}], "node attributes were dropped"
    del weight


def test_conditions_without_effects_stay_one_op():
    """Also within functions; and they run. Others are lowered."""
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)
    def inner(x):
        return tf.cond(x > 0.0, lambda: x + 1.0, lambda: x - 1.0)

    def step(x):
        changed = tf.cond(x > 5.0, lambda: variable.assign(x), lambda: variable.assign(-x))
        return [inner(x), changed]

    graph_def, names = runtime.graph_def_of(tf_functions.concrete_function(step, [tf.TensorSpec([])]))
    lowered = [node.op for node in graph_protos.inline_graph_def(graph_def, names).node]
    whole = graph_protos.inline_graph_def(graph_protos.with_whole_branches(graph_def), names)
    ops = [node.op for node in whole.node]
    assert 0 < ops.count("Merge") < lowered.count("Merge")
    assert graph_protos.WHOLE_BRANCH not in lowered
    assert ops.count(graph_protos.WHOLE_BRANCH) == 1
    name = next(node.name for node in whole.node if node.op == graph_protos.WHOLE_BRANCH)
    assert [float(run_with(whole, {"x:0": x}, name)) for x in (2.0, -2.0)] == [3.0, -3.0]


def test_flat_graphs_agree_on_names():
    @tf.function(jit_compile=True)
    def step(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 2.0), (0, x))[1]

    graph_def = step.get_concrete_function(tf.TensorSpec(())).graph.as_graph_def()
    functional, _ = graph_protos.flat_graphs(graph_def, ["Identity"])
    assert any("While" in node.op for node in functional.node)


def test_a_conditional_is_lowered_where_it_is_classified():
    """Traced for XLA it is not marked: TensorFlow would leave it as one op, also in functions."""

    @tf.function
    def inner(x):
        return tf.cond(x > 0.0, lambda: x * 2.0, lambda: x)

    concrete = tf_functions.concrete_function(lambda x: [inner(x) + 1.0], [tf.TensorSpec(())], compiled=True)
    graph_def = concrete.graph.as_graph_def()
    functional, lowered = graph_protos.flat_graphs(graph_def, ["Identity"])
    assert [node.op for node in functional.node if node.op.endswith("If")]
    assert not [node.op for node in lowered.node if node.op.endswith("If")]
    assert "Merge" in {node.op for node in lowered.node}


def test_called_by():
    """By the op's name, in an attribute, in a list of branches."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="a", op="by_name")
    graph_def.node.add(name="b", op="While").attr["body"].func.name = "body"
    graph_def.node.add(name="c", op="Case").attr["branches"].list.func.add(name="branch")
    assert {"by_name", "body", "branch"} <= graph_protos.called_by(graph_def.node)


def test_op_def():
    assert graph_protos.op_def("MatMul").input_arg[0].name == "a"
    assert graph_protos.op_def("NoSuchOpAnywhere") is None


def test_is_stateful():
    assert graph_protos.is_stateful("AssignVariableOp"), "op_def_registry: state is no longer told"
    assert graph_protos.is_stateful("NoSuchOpAnywhere"), "an unknown op must count as stateful"
    assert not graph_protos.is_stateful("MatMul")


def test_is_known_op():
    assert graph_protos.is_known_op("MatMul")
    assert not graph_protos.is_known_op("NoSuchOpAnywhere")


def test_has_reference_inputs():
    assert graph_protos.has_reference_inputs("Assign"), (
        "OpDef.ArgDef.is_ref: writes to old variables are not seen"
    )
    assert not graph_protos.has_reference_inputs("RefSwitch"), "control flow only hands a variable on"
    assert not graph_protos.has_reference_inputs("MatMul")


def test_resource_inputs():
    assert graph_protos.resource_inputs("AssignVariableOp") == (0,)
    assert graph_protos.resource_inputs("ResourceApplyMomentum") == (0, 1), "slots are no longer found"
    assert graph_protos.resource_inputs("MatMul") == graph_protos.resource_inputs("NoSuchOpAnywhere") == ()


def test_keeps_random_state():
    assert graph_protos.keeps_random_state("RandomUniform"), (
        "a copy of such a step would draw the same numbers"
    )
    assert not graph_protos.keeps_random_state("StatelessRandomUniformV2")
    assert not graph_protos.keeps_random_state("NoSuchOpAnywhere")


def test_attribute_names():
    assert {"T", "strides", "padding"} <= graph_protos.attribute_names("Conv2D")
    assert graph_protos.attribute_names("NoSuchOp") == frozenset()


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
        assert graph_protos.allows_types(node) == allowed, (op, dtype)


def test_output_names():
    graph = tf.Graph()
    with graph.as_default():
        tf.split(tf.zeros([4]), 2, name="parts")
        tf.raw_ops.FusedBatchNormV3(
            x=tf.zeros([1, 2, 2, 1]), scale=[1.0], offset=[1.0], mean=[], variance=[], name="norm"
        )
        tf.raw_ops.IdentityN(input=[tf.zeros([]), tf.zeros([], tf.int64)], name="both")
    nodes = {node.name: node for node in graph.as_graph_def().node}
    assert graph_protos.output_names(nodes["parts"]) == ["parts:output:0", "parts:output:1"]
    assert graph_protos.output_names(nodes["both"]) == ["both:output:0", "both:output:1"]
    names = graph_protos.output_names(nodes["norm"])
    assert names[:2] == ["norm:y:0", "norm:batch_mean:0"], "OpDef.output_arg: outputs have other names"
    assert len(names) == 6
    assert graph_protos.output_names(tf.compat.v1.NodeDef(op="NoOp")) == []


def test_what_communicates():
    assert all(map(graph_protos.is_communication, ("HorovodAllreduce", "CollectiveReduceV2", "_Recv")))
    assert not graph_protos.is_communication("MatMul")


@pytest.mark.parametrize(
    ("text", "pair"), [("a", ("a", 0)), ("a:3", ("a", 3)), ("^a", ("a", -1)), ("s/a:0", ("s/a", 0))]
)
def test_split_input(text, pair):
    assert graph_protos.split_input(text) == pair


def test_inputs_of_a_node():
    node = tf.compat.v1.NodeDef(name="sum", op="AddV2", input=["a", "b:1", "^c"])
    assert graph_protos.data_inputs(node) == ["a", "b:1"]
    assert graph_protos.control_inputs(node) == ["^c"]
    assert [graph_protos.tensor("a", port) for port in (-1, 0, 2)] == ["^a", "a", "a:2"]


def test_make_identity():
    node = tf.compat.v1.NodeDef(name="sum", op="AddN", input=["a", "b"])
    node.attr["T"].type, node.attr["N"].i, node.attr["_note"].i = tf.float32.as_datatype_enum, 2, 3
    graph_protos.make_identity(node, ["b", "^c"])
    assert (node.op, list(node.input), sorted(node.attr)) == ("Identity", ["b", "^c"], ["T", "_note"])
