"""Micro-batches that are copies of the first of as many rows: the graph that tracing each would give."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compat.v1.graph_util import extract_sub_graph

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from grappler_passes.graph.dependencies import only_reads
from tests.graph.pipeline_fits import compiled_model
from tests.graph.pipeline_models import (
    Custom,
    DoubledByPython,
    X,
    Y,
    adam,
    attention,
    batch_normalized,
    looped,
    mlp,
    normal,
    siamese,
    whole,
)
from tests.zoo import keras, needs_keras_3
from tf_ooo.compat import keras_compiled
from tf_ooo.tracing import one_by_one, step
from tf_ooo.tracing.micro_batches import Division

pytestmark = needs_keras_3  # Keras 2 counts in the ops of the last micro-batch, and draws numbers in ops

ROWS = 14  # in micro-batches of 4, 4, 3 and 3


def dropping():
    layers = keras.layers
    dropping = [layers.Dense(9), layers.Dropout(0.3, seed=5), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((7,)), *dropping, layers.Dense(3)])


def setting_shapes():
    return keras.Sequential(
        [keras.Input((7,)), keras.layers.Dense(8), DoubledByPython(), keras.layers.Dense(3)]
    )


def noisy():
    """Its random numbers come from the state of an op, not of a variable."""
    noise = keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x), stddev=0.1))
    return keras.Sequential([keras.Input((7,)), keras.layers.Dense(8), noise, keras.layers.Dense(3)])


WORDS = (whole(19, ROWS, 8), Y[:ROWS])
TEXTS = ((whole(29, ROWS, 6).astype("int32"), whole(29, ROWS, 4).astype("int32")), Y[:ROWS])
CASES = {
    "mlp": (mlp, (X[:ROWS], Y[:ROWS])),
    "weights": (mlp, (X[:ROWS], Y[:ROWS], np.linspace(0.0, 2.0, ROWS, dtype="float32"))),
    "dropping": (dropping, (X[:ROWS], Y[:ROWS])),
    "batch_normalized": (batch_normalized, (X[:ROWS], Y[:ROWS])),
    "attention": (attention, WORDS),
    "siamese": (siamese, TEXTS),
    "looped": (looped, (normal(ROWS, 4, 2), Y[:ROWS])),
    "setting_shapes": (setting_shapes, (X[:ROWS], Y[:ROWS])),
}

# TensorFlow keeps the shapes of reductions for later gradients of the graph: of another micro-batch, too.
SHARED = {"dropping", "batch_normalized", "attention", "siamese"}


class Traced:
    """Two models alike, one whose micro-batches are copies; what their steps are, and how often traced."""

    def __init__(self, make, data, monkeypatch, **settings):
        self.calls, self.data = [], tf.nest.map_structure(tf.constant, data)
        self.copying = self._step(make, settings)
        with monkeypatch.context() as patched:
            patched.setattr(one_by_one, "TracedPart", AlwaysAnew)
            self.tracing = self._step(make, settings)

    def _step(self, make, settings):
        keras.backend.clear_session()  # the same names
        model = compiled_model(make, adam, **settings)
        model(tf.nest.map_structure(lambda rows: rows[:1], self.data[0]))
        keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
        functions, calls = step.StepFunctions(model, Division(4)), []
        train_step = model.train_step
        model.train_step = lambda data: calls.append(1) or train_step(data)
        traced = functions.concrete(self.data)
        self.calls.append(len(calls))
        return model, functions, traced

    @property
    def graphs(self):
        return [used(traced.graph) for _, _, traced in (self.copying, self.tracing)]

    def trained(self):
        """Weights, states and logs of each after two steps."""
        left = []
        for model, functions, _ in (self.copying, self.tracing):
            logs = [functions(self.data) for _ in range(2)]
            state = [variable.numpy() for variable in keras_compiled.state_of(model.optimizer)]
            left.append([*model.get_weights(), *state, *map(np.asarray, tf.nest.flatten(logs))])
        return left


def used(graph):
    """The GraphDef without the ops that TensorFlow removes before it runs anything.

    The end of a step waits for reads only if something takes their values, which copies may lack.
    """
    ends = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    graph_def = graph.as_graph_def()
    reads = {f"^{node.name}" for node in graph_def.node if only_reads(node.op)}
    for node in graph_def.node:
        if node.op == "NoOp":
            node.input[:] = [text for text in node.input if text not in reads]
    return extract_sub_graph(graph_def, [op.name for op in ends])


class AlwaysAnew(one_by_one.TracedPart):
    """Micro-batches that are never copied."""

    def end(self, left_out, wanted):
        self.why_not = "asked for"


@pytest.mark.parametrize("case", CASES)
def test_copies_are_what_another_trace_gives(case, monkeypatch):
    make, data = CASES[case]
    traced = Traced(make, data, monkeypatch)
    assert traced.calls == [2, 4], "of 4, 4, 3 and 3 rows two are traced"
    if case not in SHARED:
        copying, tracing = (nodes_of(graph) for graph in traced.graphs)
        assert copying == tracing
    ours, theirs = traced.trained()
    for a, b in zip(ours, theirs, strict=True):
        assert a.tobytes() == b.tobytes()


# TensorFlow numbers them anew in each trace.
NUMBERED = ("_gradient_op_type", "token")
BRANCHES = ("If", "While", "StatelessIf", "StatelessWhile")
# Scopes of the sums of gradients, and ops of that name: the sums of a copy come after its other ops.
SUM = re.compile(r"/sum(_\d+)?(?=/|:|$)", re.IGNORECASE)


def nodes_of(graph_def):
    """Return how many nodes there are of each kind: name, op, inputs, device and attributes."""
    kinds = Counter()
    for node in graph_def.node:
        attributes = {name: str(value) for name, value in node.attr.items() if name not in NUMBERED}
        kept = () if node.op in BRANCHES else tuple(sorted(attributes.items()))
        inputs = tuple(SUM.sub("/sum", text) for text in node.input)
        kinds[SUM.sub("/sum", node.name), node.op, inputs, node.device, kept] += 1
    return kinds


def test_state_of_an_op_is_traced_again(monkeypatch):
    """Copies would draw the same numbers."""
    traced = Traced(noisy, (X[:ROWS], Y[:ROWS]), monkeypatch)
    assert traced.calls == [4, 4]
    seeds = [node.attr["seed2"].i for node in traced.graphs[0].node if node.op == "RandomStandardNormal"]
    assert len(set(seeds)) == len(seeds) == 4


def test_a_train_step_of_one_s_own(monkeypatch):
    traced = Traced(Custom, (X[:ROWS], Y[:ROWS]), monkeypatch, loss=None, metrics=None)
    assert traced.calls == [2, 4]
    ours, theirs = traced.trained()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


def test_marks_and_names():
    """Each copy's ops are marked, and named, as its own."""
    model = compiled_model(mlp, adam)
    keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
    functions = step.StepFunctions(model, Division(4))
    graph_def = functions.concrete((tf.constant(X[:16]), tf.constant(Y[:16]))).graph.as_graph_def()
    scope = re.compile(rf"(?:^|/){STEP_SCOPE}(\d+)(?:/|$)")
    marked = [node for node in graph_def.node if STEP_ATTR in node.attr and scope.search(node.name)]
    assert {node.attr[STEP_ATTR].i for node in marked} == set(range(5))
    wrong = [node.name for node in marked if int(scope.search(node.name)[1]) != node.attr[STEP_ATTR].i]
    assert wrong == []
    products = [node for node in marked if node.op == "MatMul"]
    for node in products:
        read = {scope.search(text)[1] for text in node.input if scope.search(text) and "resource" not in text}
        assert len(read) <= 1, f"{node.name} reads of two micro-batches"


def test_variables_that_the_first_step_makes_do_not_trace_it_twice():
    """Metrics are made by the first step."""
    calls, model = [], compiled_model(mlp, adam)
    keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
    train_step = model.train_step
    model.train_step = lambda data: calls.append(1) or train_step(data)
    logs = step.StepFunctions(model, Division(4))((tf.constant(X[:16]), tf.constant(Y[:16])))
    assert calls == [1]
    assert 0.0 <= float(logs["accuracy"]) <= 1.0
