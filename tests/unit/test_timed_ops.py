"""Labels and metrics do not say when a stage ran."""

from __future__ import annotations

from tensorflow.core.framework import graph_pb2

from tf_ooo.planning.model.task import Task
from tf_ooo.rewriting.lowering import timed_ops

F0, F1 = Task("F", 0), Task("F", 1)
# name: op, inputs, task
STEP = {
    "rows": ("IteratorGetNext", [], None),
    "x": ("Slice", ["rows"], F0),
    "w0": ("ReadVariableOp", [], F0),
    "y0": ("MatMul", ["x", "w0"], F0),
    "one_hot": ("OneHot", ["rows:1"], F1),
    "smooth": ("Mul", ["one_hot"], F1),
    "w1": ("ReadVariableOp", [], F1),
    "gain": ("Softplus", ["w1"], F1),
    "y1": ("MatMul", ["y0", "gain"], F1),
    "loss": ("Sub", ["y1", "smooth", "^late"], F1),
    "late": ("NoOp", ["y0"], None),
    "seen": ("ReadVariableOp", [], F1),
    "count": ("AddV2", ["seen", "y1"], F1),
    "do1": ("MatMul", ["loss", "gain"], Task("dO", 1)),
    "dw0": ("MatMul", ["do1", "x"], Task("dW", 0)),
    "u0": ("AssignSubVariableOp", ["dw0"], Task("U", 0)),
}


def _graph(step):
    graph = graph_pb2.GraphDef()
    for name, (op, read, _) in step.items():
        graph.node.add(name=name, op=op).input.extend(read)
    return graph, {name: task for name, (_, _, task) in step.items() if task is not None}


def test_labels_and_metrics_are_left_out():
    graph, tasks = _graph(STEP)
    assert tasks.keys() - timed_ops(graph, tasks).keys() == {"one_hot", "smooth", "seen", "count"}


def test_a_task_that_has_only_such_ops_keeps_them():
    graph, tasks = _graph({"x": ("Slice", [], F0), "labels": ("Cast", [], F1)})
    assert timed_ops(graph, tasks) == tasks
