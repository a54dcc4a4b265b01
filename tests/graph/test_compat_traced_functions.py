"""An upgrade may break what is read of traced functions."""

from __future__ import annotations

import json

import tensorflow as tf

from grappler_passes.compat import shape_inference, traced_functions
from tests.graph.compat_models import described, square_step


def test_graph_def_of():
    weight, function = square_step()
    graph_def, fetches = traced_functions.graph_def_of(function)
    assert described(graph_def) == [{"name": "weight", "trainable": True}], (
        "FuncGraph.captures, Variable.handle or FuncGraph._weak_variables changed: no variable is found"
    )
    handle = next(node for node in graph_def.node if "_ooo_variable" in node.attr)
    shape = handle.attr[shape_inference.HANDLE_SHAPES].list.shape[0]
    assert [dim.size for dim in shape.dim] == weight.shape, "handle_data_util no longer knows the shape"
    assert set(fetches) <= {node.name for node in graph_def.node}


def test_graph_def_of_survives_a_deleted_variable():
    weight, function = square_step()
    del weight
    assert traced_functions.graph_def_of(function)[1]


def test_func_graph_transforms():
    seen = []
    transforms = traced_functions.func_graph_transforms()
    transforms.append(seen.append)
    try:
        tf.function(lambda x: x + 1.0)(tf.constant(1.0))
    finally:
        transforms.remove(seen.append)
    assert seen, "FUNC_GRAPH_TRANSFORMS is no longer called: no graph is marked, nothing is rewritten"
    assert hasattr(seen[0], "captures")
    assert hasattr(seen[0], "variables")


def test_set_string_attr():
    with tf.Graph().as_default() as graph:
        op = tf.constant(1.0, name="one").op
        traced_functions.set_string_attr(op, "_ooo_test", "value")
    node = graph.as_graph_def().node[0]
    assert node.attr["_ooo_test"].s == b"value", "Operation._set_attr no longer writes into the graph"


def test_variables_of_one_name_are_told_apart():
    assert list(traced_functions.numbered(["a", "a_1", "a", "b", "a"])) == ["a", "a_1", "a_2", "b", "a_3"]
    first, second = tf.Variable([1.0, 2.0], name="kernel"), tf.Variable([3.0], name="kernel")
    concrete = tf.function(lambda: first[0] + second[0]).get_concrete_function()
    graph_def, _ = traced_functions.graph_def_of(concrete)
    described = [node.attr[traced_functions.VARIABLE_ATTR].s for node in graph_def.node]
    assert [json.loads(text)["name"] for text in described if text] == ["kernel", "kernel_1"]
