"""The edges of one lane, and of lanes whose backward is one task."""

import pytest
import tensorflow as tf

from grappler_passes.graph.dependencies import GraphIndex
from tests.graph.pipeline_fits import Training, fits_of
from tests.graph.pipeline_graphs import Rewritten
from tests.graph.pipeline_models import EVEN, mlp, momentum
from tf_ooo.planning.model.schedule import Task
from tf_ooo.rewriting.ordering import order_lane

DO, DW, NEXT = Task("dO", 0), Task("dW", 0), Task("F", 0, 1)


def lane(sizes, fused=False):
    """Edges of a lane whose dW has three results."""
    with tf.Graph().as_default() as graph:
        gradient = tf.compat.v1.placeholder("float32", (4, 4), name="in")
        output_grad = tf.tanh(gradient, name="o")
        for number in range(3):
            tf.matmul(output_grad, output_grad, name=f"w{number}")
        tf.tanh(gradient, name="f")
    index = GraphIndex(graph.as_graph_def())
    ops = {DO: [index.index["o"]], NEXT: [index.index["f"]]}
    ops[DW] = [index.index[f"w{number}"] for number in range(3)]
    return order_lane(index, [DO, DW, NEXT], ops, "lane", fused, sizes)


def between_results(order):
    return [{a, b} for a, b in order.edges if a[0] == b[0] == "w"]


def test_large_gradients_of_a_task_are_computed_one_after_the_other():
    mebibyte = 1024**2
    large = {"w0": mebibyte, "w1": mebibyte - 1, "w2": 3 * mebibyte}
    assert between_results(lane(large)) == [{"w0", "w2"}]
    assert between_results(lane({})) == []
    # Computed together with their dO they come one by one anyway.
    assert between_results(lane(large, fused=True)) == []


def test_what_a_large_gradient_is_added_up_from_waits_too():
    with tf.Graph().as_default() as graph:
        given = tf.compat.v1.placeholder("float32", (4, 4), name="in")
        before = tf.tanh(given, name="o")
        tf.matmul(before, before, name="whole")
        parts = [tf.matmul(before, before, transpose_a=bool(n), name=f"part{n}") for n in range(2)]
        tf.add_n(parts, name="added")
        tf.tanh(given, name="f")
    index = GraphIndex(graph.as_graph_def())
    ops = {DO: [index.index["o"]], NEXT: [index.index["f"]]}
    ops[DW] = [index.index[name] for name in ("whole", "part0", "part1", "added")]
    sizes = dict.fromkeys(("whole", "added"), 1024**2)
    order = order_lane(index, [DO, DW, NEXT], ops, "lane", sizes=sizes)
    # All of dW reads what dO makes: no edges between the two.
    if index.position[index.index["whole"]] < index.position[index.index["added"]]:
        assert sorted(order.edges) == [("added", "f"), ("whole", "part0"), ("whole", "part1")]
    else:
        assert sorted(order.edges) == [("added", "whole"), ("whole", "f")]
    assert order.joins == []


@pytest.mark.devices(2)
def test_where_backward_is_one_task_messages_wait_for_its_dw():
    """Backward is one task in PyTorch, which GPipe and 1F1B are measured with."""
    training = Training(mlp, momentum, EVEN, epochs=1)
    for fitted in fits_of(training, "gpipe", "1f1b").values():
        assert fitted.report.planned.fused_backward
        waiting, early = Rewritten(fitted.report).sent_early()
        # One message between two stages in each of four micro-batches, for a kernel's gradient at least.
        assert waiting >= 4
        assert early == []
