"""Costs of layers from measured seconds that are given: of ops, and of the step."""

from __future__ import annotations

import pytest
import tensorflow as tf

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.costs.profile import OpProfile
from tf_ooo.fit.measured import measured_costs
from tf_ooo.rewriting.step_graph import Known, StepGraph

KINDS = {"F": OpKind.FORWARD, "dO": OpKind.OUTPUT_GRAD, "dW": OpKind.WEIGHT_GRAD}
# Two layers: the task of each op, and what it reads.
WHERE = {
    "a": ("F", 0, "x"),
    "b": ("F", 1, "a"),
    "down": ("dO", 1, "b"),
    "of_b": ("dW", 1, "b"),
    "of_a": ("dW", 0, "down"),
}
SECONDS = {"a": 1.0, "b": 2.0, "down": 3.0, "of_b": 4.0, "of_a": 6.0}


def step():
    with tf.Graph().as_default() as graph:
        tensors = {"x": tf.compat.v1.placeholder(tf.float32, (2, 3), name="x")}
        for name, (_, _, source) in WHERE.items():
            tensors[name] = tf.tanh(tensors[source], name=name)
    graph_def = graph.as_graph_def()
    ops = {"x": Op("x", "_Arg", OpKind.FORWARD)}
    for name, (kind, layer, source) in WHERE.items():
        of_layer = layer if kind == "dW" else None
        ops[name] = Op(name, "Tanh", KINDS[kind], inputs=((source, 0),), output_bytes=24, layer=of_layer)
    layers = (Layer(0, ("v",), ("of_a",)), Layer(1, ("w",), ("of_b",)))
    variables = tuple(Variable(name, name, (3,)) for name in "vw")
    where = {name: (kind, layer) for name, (kind, layer, _) in WHERE.items()}
    known = Known(TrainingGraph(ops, layers, variables), graph_def, frozenset(ops), where, {})
    none = [0] * len(ops)
    return StepGraph(graph_def, GraphIndex(graph_def), none, none, 1, known, {name: name for name in ops})


def costs_s(step_s):
    """F, dO and dW of both layers, for a step that took so long."""
    profile = OpProfile(SECONDS | {"of_another_graph": 100.0}, {}, 1, step_s, 0.0)
    layers = measured_costs(step(), profile).layers
    return [(layer.forward_s, layer.output_grad_s, layer.weight_grad_s) for layer in layers]


@pytest.mark.parametrize(
    ("step_s", "factor"),
    [
        (16.0, 1.0),
        (24.0, 1.5),  # the executor takes half as long again
        (8.0, 1.0),  # some ops ran side by side
        (1600.0, 4.0),  # of ops that take next to nothing this is the call of the function
    ],
)
def test_what_a_step_takes_beside_its_ops_comes_with_each_op(step_s, factor):
    own = [(1.0, 0.0, 6.0), (2.0, 3.0, 4.0)]
    assert costs_s(step_s) == [tuple(factor * seconds for seconds in layer) for layer in own]


@pytest.mark.parametrize(
    ("timed_s", "factor"),
    [
        ((20.0, 24.0), 1.25),  # without the profiler a step takes less
        ((8.0,), 0.5),  # of which more than half was the profiler's
        ((99.0,), 2.0),  # disturbed
    ],
)
def test_the_shortest_step_counts(timed_s, factor):
    profile = OpProfile(SECONDS, {}, 2, 32.0, 0.0)
    layers = measured_costs(step(), profile, timed_s).layers
    assert [layer.forward_s for layer in layers] == [1.0 * factor, 2.0 * factor]


def test_shares_of_the_cores(monkeypatch):
    """Half of the step is between ops, where one thread is at work."""
    monkeypatch.setattr("tf_ooo.fit.measured.usable_cores", lambda: 4)
    core_s = {"a": 4.0, "b": 2.0, "down": 7.5, "of_a": 24.0}
    profile = OpProfile(SECONDS, {}, 1, 32.0, 0.0, core_s)
    first, second = measured_costs(step(), profile).layers
    # F: of 2 s 1 s with 4 cores, 1 s with one; no dO: one core; dW: 6 s with 4 of 4, 6 s with one.
    assert first.occupancy == pytest.approx(((4 + 1) / 2 / 4, 0.25, (24 + 6) / 12 / 4))
    # The dW was not seen: one core.
    assert second.occupancy == pytest.approx(((2 + 2) / 4 / 4, (7.5 + 3) / 6 / 4, 0.25))
    assert measured_costs(step(), OpProfile(SECONDS, {}, 1, 32.0, 0.0)).layers[0].occupancy is None
