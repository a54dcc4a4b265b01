"""Costs of a pipeline from measured seconds that are given: of ops, of the step, of links."""

from __future__ import annotations

import pytest
import tensorflow as tf

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.profile import OpProfile
from tf_ooo.modes.pipeline import measured
from tf_ooo.rewriting.unrolled_tasks import Known, Step

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
    return Step(graph_def, GraphIndex(graph_def), [0] * len(ops), 1, known, {}, frozenset())


def costs_s(step_s):
    """F, dO and dW of both layers, for a step that took so long."""
    profile = OpProfile(SECONDS | {"of_another_graph": 100.0}, {}, 1, step_s, 0.0)
    layers = measured.measured_costs(step(), profile).layers
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


HOSTS = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(4)]


@pytest.fixture
def links(monkeypatch):
    """Measured between neighbours: which one is slow differs by what is asked."""
    between = {
        (HOSTS[0], HOSTS[1]): Link(3e-3, 2e6, 1e-9),
        (HOSTS[1], HOSTS[2]): Link(1e-3, 1e6, 2e-9),
        (HOSTS[2], HOSTS[3]): Link(2e-3, 3e6, 5e-9),
    }
    monkeypatch.setattr(measured, "measure_device_link", lambda a, b: between[a, b])


def test_the_slowest_link_counts_for_all(links):
    assert measured.link_between(HOSTS) == Link(3e-3, 1e6, 5e-9)
    assert measured.link_between(HOSTS[1:3]) == Link(1e-3, 1e6, 2e-9)


def test_cpus_of_one_process_hand_over(links):
    cpus = [HOSTS[0], HOSTS[0].replace("CPU:0", "CPU:1")]
    assert measured.link_between(cpus) == Link(30e-6)
    assert measured.link_between(cpus[:1]) == Link(0.0)
    assert measured.link_between([*reversed(cpus), HOSTS[1]]) == Link(3e-3, 2e6, 1e-9)
