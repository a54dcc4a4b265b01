"""Tests which layer the ops of a backward pass run with."""

from __future__ import annotations

import dataclasses

import pytest
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.rewriting.loops import layers_using, loop_tasks, ops_of_data
from tf_ooo.rewriting.tasks import _handed_on, _output_grad_layers, _touching

F, DO, DW = OpKind.FORWARD, OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD


def op(name, kind_of_op, kind, *inputs):
    return Op(name, kind_of_op, kind, inputs=tuple((source, 0) for source in inputs))


def test_a_constant_that_all_layers_share_takes_no_gradient_to_the_first():
    ops = [
        op("axes", "Const", F),
        op("x0", "Relu", F),
        op("mean0", "Mean", F, "x0", "axes"),
        op("x1", "Relu", F, "mean0"),
        op("mean1", "Mean", F, "x1", "axes"),
        op("x2", "Relu", F, "mean1"),
        op("grad2", "ReluGrad", DO, "x2"),
        op("sum1", "Sum", DO, "grad2", "axes"),
        op("grad1", "ReluGrad", DO, "sum1", "x1"),
        op("sum0", "Sum", DO, "grad1", "axes"),
        op("grad0", "ReluGrad", DO, "sum0", "x0"),
    ]
    layers = tuple(Layer(i, (f"w{i}",)) for i in range(3))
    graph = TrainingGraph({one.name: one for one in ops}, layers, ())
    # Constants depend on no weight, so they count to the first layer.
    forward = {"axes": 0, "x0": 0, "mean0": 0, "x1": 1, "mean1": 1, "x2": 2}
    found = _output_grad_layers(graph, _touching(graph, forward), {}, [0b0, 0b1, 0b11])
    assert found == {"grad2": 2, "sum1": 2, "grad1": 1, "sum0": 1, "grad0": 0}


def embedding_below_two_layers():
    """Looked up, multiplied by w1, and by the embedding again: it has gradients from above and below."""
    ops = [
        op("e", "_Arg", OpKind.OTHER),
        op("w", "_Arg", OpKind.OTHER),
        op("words", "_Arg", F),
        op("x0", "ResourceGather", F, "e", "words"),
        op("kernel", "ReadVariableOp", F, "w"),
        op("x1", "MatMul", F, "x0", "kernel"),
        op("table", "ReadVariableOp", F, "e"),
        op("logits", "MatMul", F, "x1", "table"),
        op("grad2", "SoftmaxGrad", DO, "logits"),
        op("grad1", "MatMul", DO, "grad2", "table"),
        op("above", "MatMul", DW, "x1", "grad2"),
        op("down", "MatMul", DW, "grad1", "kernel"),
        op("below", "UnsortedSegmentSum", DW, "down", "words"),
        op("both", "AddN", DW, "above", "below"),
    ]
    ops = [dataclasses.replace(one, layer=0) if one.kind is DW else one for one in ops]
    layers = (Layer(0, ("e",)), Layer(1, ("w",)))
    graph = TrainingGraph({one.name: one for one in ops}, layers, (Variable("e", "e"), Variable("w", "w")))
    forward = {"words": 0, "x0": 0, "kernel": 1, "x1": 1, "table": 0, "logits": 1}
    return graph, forward


def test_a_weight_is_used_where_data_meets_it():
    graph, forward = embedding_below_two_layers()
    assert layers_using(graph, forward, ops_of_data(graph)) == [{0, 1}, {1}]


def test_what_takes_a_gradient_down_to_the_lowest_layer_is_its_upper_neighbours_output_gradient():
    graph, forward = embedding_below_two_layers()
    away = {"above": 1, "down": 1}
    assert _handed_on(graph, forward, _touching(graph, forward), away) == {"down"}


def test_a_tied_weight_that_is_scaled_has_its_gradient_above_all_the_same():
    """The sum of its gradients goes down through what was made of the weight alone: no activation."""
    graph, forward = embedding_below_two_layers()
    scaled = [op("scale", "Rsqrt", F, "table"), op("scaled", "Mul", DW, "both", "scale")]
    more = {one.name: dataclasses.replace(one, layer=0) if one.kind is DW else one for one in scaled}
    graph = dataclasses.replace(graph, ops={**graph.ops, **more})
    forward["scale"] = 0
    away = {"above": 1, "down": 1}
    assert _handed_on(graph, forward, _touching(graph, forward), away) == {"down"}


@pytest.mark.parametrize(("read", "layer"), [("low_end", 0), ("high_end low_end", 1), ("low_end between", 1)])
def test_a_gradients_loop_runs_with_the_highest_loop_of_which_it_reads_results(read, layer):
    """The loops are low, high and grad, each an op with its Enters and its Exit; ``between`` is in none."""
    rows = [
        "x _Arg", "low_x Enter x", "low Tanh low_x", "low_end Exit low", "high_low Enter low_end",
        "high Tanh high_low", "high_end Exit high", "between Tanh high_end",
        *(f"grad_{source} Enter {source}" for source in read.split()),
        " ".join(["grad Tanh", *(f"grad_{source}" for source in read.split())]), "grad_end Exit grad",
    ]  # fmt: skip
    graph_def, ops = graph_pb2.GraphDef(), []
    for name, kind, *inputs in map(str.split, rows):
        frame = name.partition("_")[0]
        ops.append(op(name, kind, DO if frame == "grad" else F, *inputs))
        graph_def.node.add(name=name, op=kind, input=inputs).attr["frame_name"].s = frame.encode()
    graph = TrainingGraph({one.name: one for one in ops}, (Layer(0, ("v",)), Layer(1, ("w",))), ())
    loops = loop_tasks(graph, GraphIndex(graph_def), {"low": 0, "high": 1, "between": 1})
    assert [(loop.kind, loop.layer) for loop in loops] == [("F", 0), ("F", 1), ("dO", layer)]
