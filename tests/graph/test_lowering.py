"""Control edges of a schedule."""

from __future__ import annotations

import tensorflow as tf

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph
from tests.graph.graphs import flat
from tf_ooo.modes.single_device.options import SingleDevice
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.rewriting.lowering import lower, task_ops
from tf_ooo.rewriting.one_device import rewrite_graph


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


def test_what_moved_are_all_ops_of_the_tasks_that_wait():
    """Three layers, each with a bias: dW of a layer is some ops, of which not each has an edge."""
    weights = [(tf.Variable(tf.ones((4, 4))), tf.Variable(tf.ones(4))) for _ in range(3)]
    flat_weights = [weight for pair in weights for weight in pair]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for kernel, bias in weights:
                x = tf.tanh(x @ kernel + bias)
            loss = tf.reduce_sum(x**2)
        for weight, gradient in zip(flat_weights, tape.gradient(loss, flat_weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    graph_def = flat(step, tf.TensorSpec((5, 4)))[0]
    result = rewrite_graph(graph_def, SingleDevice(schedule="fast_forward"))
    had = {node.name: len(node.input) for node in graph_def.node}
    waits = {node.name for node in result.graph_def.node if len(node.input) > had[node.name]}
    moved = {task: ops for task, ops in task_ops(result.training_graph).ops.items() if waits & set(ops)}
    # All dO come first; dW of the lowest layer reads what they make.  Of each: the kernel's product, the sum
    # for the bias and what gives it its shape.
    assert {str(task): len(ops) for task, ops in moved.items()} == {"dW:2": 4, "dW:1": 4}
    assert result.moved_ops == 8
