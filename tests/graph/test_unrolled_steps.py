"""Steps unrolled in one graph: told apart, ordered one by one, the same bits."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import split_steps, steps_of
from grappler_passes.graph.training_graph import OpKind
from tests import zoo
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.modes.data_parallel.ordering import request_to_look, request_to_order
from tf_ooo.rewriting.lowering import task_ops
from tf_ooo.rewriting.plan import plan
from tf_ooo.tracing.flat import StepSource, Unrolled

pytestmark = pytest.mark.takes(20)

STEPS = 4


def model_of(kind):
    layers = keras.layers
    keras.utils.set_random_seed(3)
    if kind == "mlp":
        inner = [layers.Dense(16, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((12,)), *inner, layers.Dense(4)])
    elif kind == "cnn":
        x = keras.Input((12,))
        y = layers.Reshape((2, 6, 1))(x)
        y = layers.Conv2D(4, 2, padding="same")(y)
        y = layers.BatchNormalization()(y)
        y = layers.Dropout(0.2, seed=1)(y)
        z = layers.Conv2D(4, 2, padding="same", activation="relu")(y)
        model = keras.Model(x, layers.Dense(4)(layers.Flatten()(layers.Add()([y, z]))))
    else:
        inner = [layers.Reshape((4, 3)), layers.LSTM(6)]
        model = keras.Sequential([keras.Input((12,)), *inner, layers.Dense(4)])
    optimizer = keras.optimizers.Adam(0.01)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    optimizer.build(model.trainable_variables)
    if zoo.KERAS_3:
        zoo.make_variables(model, *(rows.numpy() for rows in batches(1)[0]))
    return model


def batches(count=STEPS):
    random = np.random.default_rng(5)
    made = [(random.normal(size=(8, 12)).astype("float32"), random.integers(0, 4, 8)) for _ in range(count)]
    return [(tf.constant(x), tf.constant(y)) for x, y in made]


SPEC = (tf.TensorSpec((None, 12), tf.float32), tf.TensorSpec((None,), tf.int64))


def scheduled(name, **options):
    def schedule_for(graph):
        layers = [LayerCosts(1, 1, 1, weight_bytes=1)] * len(graph.layers)
        return plan(layers=layers, schedule=name, mode="data_parallel", devices=2, **options)

    return schedule_for


def trained(kind, request_of=None):
    """Weights after two executions, the last logs, and the request."""
    model = model_of(kind)
    request = None if request_of is None else request_of(model)
    more = {} if request is None else {"tracing": request.tracing}
    unrolled = Unrolled(StepSource(model, lambda step: step, SPEC), STEPS, **more)
    for _ in range(2):
        logs = unrolled(batches())
    return model.get_weights(), {key: float(value) for key, value in logs.items()}, request


def shapes(graph):
    """Return the shapes of each layer's variables."""
    of = {variable.name: str(variable.shape) for variable in graph.variables}
    return [sorted(of[name] for name in layer.variables) for layer in graph.layers]


@pytest.mark.parametrize("kind", ["mlp", "cnn", "rnn"])
def test_every_step_is_classified_like_a_graph_of_one_step(kind):
    _, _, request = trained(kind, request_to_look)
    graphs = [classify_graph_def(graph) for graph in split_steps(request.result.graph_def)]
    assert len(graphs) == STEPS
    model = model_of(kind)
    one = request_to_look(model)
    Unrolled(StepSource(model, lambda step: step, SPEC), 1, one.tracing)(batches(1))
    alone = classify_graph_def(split_steps(one.result.graph_def)[0])
    assert not alone.unclassified
    for graph in graphs:
        assert not graph.unclassified
        assert shapes(graph) == shapes(alone)
        assert list(task_ops(graph).ops) == list(task_ops(alone).ops)
        for kind_of_op in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.UPDATE):
            assert len(graph.of_kind(kind_of_op)) == len(alone.of_kind(kind_of_op))


@pytest.fixture(scope="module")
def stock():
    return functools.cache(lambda kind: trained(kind)[:2])


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("mlp", "reverse_first_k", {"k": 3}),
        ("mlp", "in_order", {}),
        ("cnn", "reverse_first_k", {"k": 2}),
        ("cnn", "fast_forward", {}),
        ("rnn", "reverse_first_k", {"k": 1}),
    ],
)
def test_ordered_steps_give_the_same_bits(stock, kind, name, options):
    weights, logs = stock(kind)
    ordered, ordered_logs, request = trained(
        kind, lambda model: request_to_order(model, scheduled(name, **options))
    )
    assert request.failure() is None
    assert request.result.schedule.policy == name
    assert request.result.added_edges >= STEPS
    assert logs == ordered_logs
    assert all(a.tobytes() == b.tobytes() for a, b in zip(weights, ordered, strict=True))


def test_no_edge_leads_from_one_step_to_another():
    _, _, request = trained("mlp", lambda model: request_to_order(model, scheduled("reverse_first_k", k=3)))
    after = request.result.graph_def
    step = dict(zip([node.name for node in after.node], steps_of(after), strict=True))
    ordered = [node for node in after.node if "_ooo_kind" in node.attr and node.attr["_ooo_kind"].s == b"dW"]
    assert {step[node.name] for node in ordered} == set(range(STEPS))
    for node in ordered:
        assert {step[text[1:]] for text in node.input if text[0] == "^"} <= {step[node.name]}


def test_a_schedule_of_another_model_leaves_the_stock_order(stock):
    def wrong(graph):
        return plan(layers=[LayerCosts(1, 1, 1)] * 9, schedule="in_order", mode="data_parallel", devices=2)

    weights, _ = stock("mlp")
    mine, _, request = trained("mlp", lambda model: request_to_order(model, wrong))
    assert "ScheduleError" in request.failure()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(weights, mine, strict=True))
