"""Bytes of the lists that loops fill, from how often they run."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from graphs import flat

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.graph.sizes import KnownShapes, with_list_sizes, with_sizes

ROWS, WIDTH = 6, 5


def sized(train_step, *specs):
    """The graph of a step with the bytes of its lists, and that graph."""
    graph_def, _, _ = flat(tf.function(train_step), *specs)
    graph = with_sizes(classify_graph_def(graph_def), graph_def, KnownShapes(), only_open=True)
    return with_list_sizes(graph, graph_def), graph_def


def lists_of(graph, graph_def):
    """Bytes of what goes around loops and is a list, those of several elements."""
    names = [node.name for node in graph_def.node if node.op == "Merge" and node.attr["T"].type == 21]
    return [graph.ops[name].output_bytes for name in names if name in graph.ops]


class Products:
    """``steps`` products with one weight, each kept for the gradient."""

    def __init__(self):
        self.weight = tf.Variable(np.eye(WIDTH, dtype="float32"))

    def train(self, x, steps):
        with tf.GradientTape() as tape:
            _, x = tf.while_loop(
                lambda i, x: i < steps, lambda i, x: (i + 1, tf.tanh(x @ self.weight)), (tf.constant(0), x)
            )
            loss = tf.reduce_sum(x)
        self.weight.assign_sub(0.1 * tape.gradient(loss, self.weight))
        return loss


@pytest.mark.parametrize("steps", [3, 7])
def test_an_element_for_each_iteration(steps):
    products = Products()
    graph, graph_def = sized(lambda x: products.train(x, steps), tf.TensorSpec((ROWS, WIDTH)))
    sizes = lists_of(graph, graph_def)
    elements = steps * ROWS * WIDTH * 4
    assert any(elements <= size < 1.5 * elements for size in sizes if size is not None)
    assert 0 in {op.output_bytes for op in graph.ops.values() if op.type == "EmptyTensorList"}


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        pytest.param(ROWS, tf.TensorSpec((), tf.int32), id="iterations"),
        pytest.param(None, None, id="rows"),
    ],
)
def test_what_nobody_knows_before_it_runs(rows, steps):
    products = Products()
    specs = [tf.TensorSpec((rows, WIDTH)), *([steps] if steps is not None else [])]
    graph, graph_def = sized(lambda x, count=3: products.train(x, count), *specs)
    assert None in {op.output_bytes for op in graph.ops.values() if op.type == "EmptyTensorList"}
    assert None in lists_of(graph, graph_def)
