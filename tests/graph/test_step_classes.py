"""Steps that are alike are classified once: with other names, the same as classified by themselves."""

from __future__ import annotations

import dataclasses

import keras
import pytest
import tensorflow as tf

from grappler_passes.analysis import steps
from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import split_steps
from tf_ooo.modes.data_parallel.ordering import layer_keys, request_to_look
from tf_ooo.tracing.flat import StepSource, Unrolled

STEPS = 5
SPEC = (tf.TensorSpec((4, 6), tf.float32), tf.TensorSpec((4, 3), tf.float32))


@pytest.fixture(scope="module")
def graphs():
    x = keras.Input((6,))
    branches = [keras.layers.Dense(5, activation=name)(x) for name in ("tanh", "relu")]
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.add(branches)))
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    request = request_to_look(model)
    source = StepSource(model, lambda step: step, SPEC)
    Unrolled(source, STEPS, request.tracing)([(tf.ones((4, 6)), tf.ones((4, 3)))] * STEPS)
    return split_steps(request.result.graph_def)


def plain(graph):
    """Without the order of ops of one layer, which says nothing."""
    fields = ("weight_grad_ops", "update_ops", "communication_ops")
    layers = {layer.variables: [sorted(getattr(layer, field)) for field in fields] for layer in graph.layers}
    ops = {name: dataclasses.replace(op, layer=None) for name, op in graph.ops.items()}
    return ops, layers, graph.variables, graph.unclassified, graph.mixed


def test_steps_that_are_alike_are_classified_once(graphs, monkeypatch):
    alone = [classify_graph_def(graph) for graph in graphs]
    classified = []

    def counted(graph):
        classified.append(graph)
        return classify_graph_def(graph)

    monkeypatch.setattr(steps, "classify_graph_def", counted)
    together = steps.classify_steps(graphs)
    assert 1 <= len(classified) < STEPS
    assert [plain(graph) for graph in together] == [plain(graph) for graph in alone]


def test_a_step_with_another_op_is_classified_by_itself(graphs):
    changed = [type(graph).FromString(graph.SerializeToString()) for graph in graphs]
    relu = next(node for node in changed[2].node if node.op == "ReluGrad")
    relu.op = "Relu6Grad"
    last_relu = steps.classify_steps(changed)[2].ops[relu.name]
    assert last_relu.type == "Relu6Grad"


def test_layers_have_the_same_keys_in_every_step(graphs):
    keys = [layer_keys(graph, classify_graph_def(graph)) for graph in graphs]
    assert sorted(keys[0]) == [(0, 1), (2, 3), (4, 5)]
    assert all(sorted(one) == sorted(keys[0]) for one in keys)
