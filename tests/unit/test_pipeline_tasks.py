"""Which layer the ops of a backward pass run with."""

from __future__ import annotations

from grappler_passes.graph import Layer, Op, OpKind, TrainingGraph
from tf_ooo.pipeline.tasks import _output_grad_layers, _touching

F, DO = OpKind.FORWARD, OpKind.OUTPUT_GRAD


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
    found = _output_grad_layers(graph, _touching(graph, forward), {})
    assert found == {"grad2": 2, "sum1": 2, "grad1": 1, "sum0": 1, "grad0": 0}
