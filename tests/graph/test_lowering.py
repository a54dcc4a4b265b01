"""Control edges of a schedule."""

from __future__ import annotations

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.rewriting.lowering import lower


def test_what_an_earlier_task_needs_gets_no_edge():
    """oneDNN makes one op of two gradients: an edge from one to what the other needs is a cycle then."""
    dO, dW = OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD

    def op(name, kind, *inputs):
        return Op(name, "Any", kind, inputs=tuple((source, 0) for source in inputs))

    ops = [
        op("dy", dO),
        op("shape", dO),
        op("bias_grad", dW, "dy"),
        op("kernel_grad", dW, "dy", "shape"),
        op("dx", dO, "dy", "shape"),
        op("first_grad", dW, "dx"),
    ]
    layers = (
        Layer(0, ("first",), weight_grad_ops=("first_grad",)),
        Layer(1, ("kernel", "bias"), weight_grad_ops=("bias_grad", "kernel_grad")),
    )
    graph = TrainingGraph({o.name: o for o in ops}, layers, ())
    lane = TaskList([Task("dO", 1), Task("dW", 1), Task("dO", 0), Task("dW", 0)])
    edges = set(lower(Schedule("m", "p", {(0, 0): lane}), graph).edges)
    assert {("bias_grad", "dx"), ("kernel_grad", "dx"), ("dx", "first_grad")} <= edges
    assert not any(after == "shape" for _, after in edges)
