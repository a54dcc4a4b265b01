"""Layer costs of graphs that TensorFlow made: of every small model, and measured on a rewritten step."""

import dataclasses
import math

import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.analysis.classify import flatten
from grappler_passes.compat import runtime
from grappler_passes.graph.training_graph import OpKind
from tests import zoo
from tf_ooo.costs.devices import device
from tf_ooo.costs.from_graph import graph_costs
from tf_ooo.costs.profile import op_seconds, profile_ops
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError

CPU = device("cpu-core")
# The graphs of these do not tell how often a loop runs.
LOOPS = {"lstm_gru", "bidirectional"}


def _keras_step(name):
    model, x, y = zoo.SMALL[name]()
    model.compile("adam", zoo.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    zoo.make_variables(model, x, y)

    @tf.function
    def step(x, y):
        return model.train_step((x, y))

    return step.get_concrete_function(*tf.nest.map_structure(tf.constant, (x, y)))


@pytest.mark.parametrize("name", sorted(set(zoo.SMALL) - LOOPS))
def test_calculated_costs_of_small_models(name):
    concrete = _keras_step(name)
    graph = tf_ooo.classify(concrete)
    seconds = op_seconds(flatten(*runtime.graph_def_of(concrete)), CPU)
    assert seconds.source == "analytic"
    costs = graph_costs(graph, seconds.seconds)
    assert len(costs.layers) == len(graph.layers)
    in_layers = sum(c.forward_s + c.output_grad_s + c.weight_grad_s + c.update_s for c in costs.layers)
    everything = sum(seconds.seconds[n] for n in graph.ops if n in seconds.seconds)
    assert math.isclose(in_layers + sum(costs.left_out_s.values()), everything)
    # Little is left out: no forward op, and no backward op, but what serves no training.
    assert set(costs.left_out_s) <= {"other", "U"}
    assert all(c.weight_bytes > 0 and c.slot_bytes == 2 * c.weight_bytes for c in costs.layers)
    for layer, layer_costs in zip(graph.layers, costs.layers, strict=True):
        of_its_own = [n for n in layer.weight_grad_ops if graph.ops[n].kind is OpKind.WEIGHT_GRAD]
        assert (layer_costs.weight_grad_s > 0) == bool(of_its_own)
    assert CostTable.from_json(CostTable(costs.layers).to_json()).layers == costs.layers


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_a_loop_cannot_be_calculated_and_says_so(name):
    concrete = _keras_step(name)
    seconds = op_seconds(flatten(*runtime.graph_def_of(concrete)), CPU)
    assert any("no formula" in note for note in seconds.notes)
    with pytest.raises(CostError, match="seconds are missing"):
        graph_costs(tf_ooo.classify(concrete), seconds.seconds)


def _rewritten_step(sizes=(64, 256, 128, 10)):
    weights = [
        tf.Variable(0.05 * tf.random.stateless_normal(shape, (i, 1)))
        for i, shape in enumerate(zip(sizes, sizes[1:], strict=False))
    ]

    @tf_ooo.function(schedule="fast_forward", profile_steps=0)
    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for w in weights:
                y = tf.nn.relu(y @ w)
            loss = tf.reduce_mean(y * y)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.01 * gradient)
        return loss

    return step


def test_measured_costs_of_a_rewritten_step():
    step, x = _rewritten_step(), tf.ones((512, 64))
    profile = profile_ops(lambda: step(x))
    graph_def = step.report.rewritten_graph
    graph = tf_ooo.classify(graph_def)
    seconds = op_seconds(graph_def, CPU, profile)
    assert {n for n, op in graph.ops.items() if op.type == "MatMul"} <= profile.seconds.keys()
    assert seconds.source in ("measured", "mixed")
    assert (seconds.source == "mixed") == any("were not measured" in note for note in seconds.notes)
    layers = graph_costs(graph, seconds.seconds).layers
    assert len(layers) == 3
    for layer, layer_costs in zip(graph.layers, layers, strict=True):
        own = [n for n in layer.weight_grad_ops if graph.ops[n].kind is OpKind.WEIGHT_GRAD]
        assert layer_costs.weight_grad_s == pytest.approx(sum(seconds.seconds[n] for n in own))
        assert any(n in profile.seconds for n in own)
    assert layers[1].inputs == (0,)
    assert [layer.weight_bytes for layer in layers] == [4 * 64 * 256, 4 * 256 * 128, 4 * 128 * 10]
    assert layers[0].output_bytes == 4 * 512 * 256


def test_what_is_not_measured_is_said():
    step, x = _rewritten_step(), tf.ones((512, 64))
    profile = profile_ops(lambda: step(x), steps=1)
    graph_def = step.report.rewritten_graph
    (product, *_) = (node.name for node in graph_def.node if node.op == "MatMul")
    seconds = dict(profile.seconds)
    del seconds[product]
    filled = op_seconds(graph_def, CPU, dataclasses.replace(profile, seconds=seconds))
    assert filled.source == "mixed"
    assert any("were not measured" in note and "cpu-core" in note for note in filled.notes)
    assert filled.seconds[product] > 0
