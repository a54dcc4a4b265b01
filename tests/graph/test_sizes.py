"""Sizes that the graph leaves open, from the shapes of the step's inputs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.analysis.classify import classify_graph_def, flatten
from grappler_passes.compat import runtime
from grappler_passes.graph.sizes import KnownShapes, with_sizes
from grappler_passes.graph.training_graph import unknown_sizes

FLOAT, INT = tf.float32.as_datatype_enum, tf.int32.as_datatype_enum


@pytest.mark.parametrize(
    ("known", "shape", "filled"),
    [
        (KnownShapes(5), (None, 3), (5, 3)),
        (KnownShapes(5), (None, None), (5, None)),
        (KnownShapes(5), (4, 3), (4, 3)),
        (KnownShapes(5), None, None),
        (KnownShapes(), (None, 3), (None, 3)),
        (KnownShapes(seen=((FLOAT, (7, 3)),)), (None, 3), (7, 3)),
        (KnownShapes(seen=((INT, (7, 3)),)), (None, 3), (None, 3)),
        (KnownShapes(seen=((FLOAT, (7, 4)),)), (None, 3), (None, 3)),
        (KnownShapes(seen=((FLOAT, (7, 3)), (FLOAT, (9, 3)))), (None, 3), (9, 3)),
        (KnownShapes(9, ((FLOAT, (9, 6)), (FLOAT, (8, 7)))), (None, None), (9, 6)),
        (KnownShapes(seen=((FLOAT, (7, 3)), (FLOAT, (9, 1)))), None, (7, 3)),
        (KnownShapes(seen=((FLOAT, ()),)), (), ()),
    ],
)
def test_fill(known, shape, filled):
    assert known.fill(FLOAT, shape) == filled


@pytest.fixture(scope="module")
def step():
    """(GraphDef, TrainingGraph) of a step on batches of any size, with a branch and a loop without lists."""
    weight = tf.Variable(np.ones((3, 2), "float32"))

    @tf.function
    def train(iterator):
        x = next(iterator)
        x = tf.cond(tf.shape(x)[0] > 0, lambda: x, lambda: tf.zeros((0, 3)))
        for _ in tf.range(4):
            x = tf.tanh(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ weight)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    data = tf.data.Dataset.from_tensor_slices(np.ones((8, 3), "float32")).batch(4)
    graph_def, fetches = runtime.graph_def_of(train.get_concrete_function(iter(data)))
    graph_def = flatten(graph_def, fetches)
    return graph_def, classify_graph_def(graph_def, fetches)


def bytes_of(graph, op_type):
    return {op.output_bytes for op in graph.ops.values() if op.type == op_type}


@pytest.mark.parametrize("known", [KnownShapes(7), KnownShapes(seen=((FLOAT, (7, 3)),))])
def test_sizes_inside_loops_and_behind_conditionals_too(step, known):
    graph_def, graph = step
    assert bytes_of(graph, "Tanh") == {None}
    sized = with_sizes(graph, graph_def, known)
    assert unknown_sizes(sized) == []
    assert bytes_of(sized, "Tanh") == {7 * 3 * 4}


def test_the_classification_stays(step):
    graph_def, graph = step
    before = graph_def.SerializeToString(deterministic=True)
    sized = with_sizes(graph, graph_def, KnownShapes(7))
    assert graph_def.SerializeToString(deterministic=True) == before
    assert [(op.name, op.kind) for op in sized.ops.values()] == [
        (op.name, op.kind) for op in graph.ops.values()
    ]


@pytest.mark.parametrize("known", [KnownShapes(), KnownShapes(seen=((FLOAT, (7, 5)),))])
def test_what_is_not_known_stays_unknown(step, known):
    graph_def, graph = step
    assert bytes_of(with_sizes(graph, graph_def, known), "Tanh") == {None}


def test_shapes_that_contradict_the_graph_tell_nothing(step, monkeypatch):
    graph_def, graph = step
    monkeypatch.setattr(KnownShapes, "fill", lambda self, dtype, shape: (7, 4) if self else shape)
    assert bytes_of(with_sizes(graph, graph_def, KnownShapes(7)), "Tanh") == {None}
