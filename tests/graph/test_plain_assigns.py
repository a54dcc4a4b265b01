"""Updates that add become assignments of a computed value, where a read of the old one is there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat.graph_protos import control_inputs, data_inputs
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.passes.plain_assigns import SUFFIX, PlainAssignsPass
from tests.graph.graphs import as_optimizers_get_it
from tf_ooo.compat import tf_functions
from tf_ooo.compat.func_graphs import OptimizedGraph


def without_needless_waits(graph_def):
    """Nobody waits for an op whose result it reads, as TensorFlow's dependency optimizer leaves it."""
    index = GraphIndex(graph_def)
    for node in graph_def.node:
        i = index.of(node.name)
        data = {p for p, _ in index.data_preds[i]}
        waits = {
            text
            for text in control_inputs(node)
            if not any(index.implied(index.of(text[1:]), p) for p in data)
        }
        node.input[:] = [*data_inputs(node), *sorted(waits)]
    return graph_def


def rewritten(function, variables):
    """Run a function before and after, from the same values; its graph, and whether all bits are the same."""
    concrete = tf_functions.concrete_function(function, [])
    before = without_needless_waits(as_optimizers_get_it(concrete))
    result, begun = PlainAssignsPass()(before), [variable.numpy() for variable in variables]
    seen = []
    for graph_def in (before, result.graph_def):
        run = OptimizedGraph(graph_def, concrete, concrete.captured_inputs)
        for variable, value in zip(variables, begun, strict=True):
            variable.assign(value)
        seen.append([*(out.numpy() for _ in range(3) for out in run()), *(v.numpy() for v in variables)])
    for was, now in zip(*seen, strict=True):
        np.testing.assert_array_equal(was, now)
    return result, Counter(node.op for node in result.graph_def.node)


@pytest.fixture
def variables():
    values = np.random.default_rng(1).normal(size=(2, 3, 5)).astype("float32")
    return [tf.Variable(value) for value in values]


def test_momentum_and_weight(variables):
    """Adam's way: a slot is added to, read again, and the weight is changed by it."""
    slot, weight = variables

    def step():
        slot.assign_add((weight * 0.25 - slot) * 0.1)
        weight.assign_sub(slot / (tf.sqrt(tf.abs(slot)) + 1e-3))
        return weight.read_value()

    result, ops = rewritten(step, variables)
    assert ops["AssignVariableOp"] == 2
    assert not ops["AssignAddVariableOp"] + ops["AssignSubVariableOp"]
    made = [node for node in result.graph_def.node if node.name.endswith(SUFFIX)]
    assert sorted(node.op for node in made) == ["AddV2", "Sub"]
    reads = {node.name for node in result.graph_def.node if node.op == "ReadVariableOp"}
    (added,) = (node.name for node in made if node.op == "AddV2")
    read = [
        text for node in result.graph_def.node if node.op == "Sqrt" or node.op == "Abs" for text in node.input
    ]
    assert added in read, "who reads the slot after its update reads what was assigned"
    assert len(reads) >= 2


def test_without_a_read_the_update_stays(variables):
    weight = variables[0]

    def step():
        weight.assign_add(tf.ones((3, 5)))
        return tf.constant(1.0)

    result, ops = rewritten(step, variables)
    assert not result.modified
    assert ops["AssignAddVariableOp"] == 1


def test_another_write_comes_between(variables):
    """The second of two writes does not add to what was read before the first."""
    weight, other = variables

    def step():
        old = weight.read_value()
        weight.assign(other * 2.0)
        weight.assign_add(old)
        return weight.read_value()

    _, ops = rewritten(step, variables)
    assert ops["AssignAddVariableOp"] == 1


def test_several_updates_of_one_variable(variables):
    """Each adds to what the one before has left."""
    weight, other = variables

    def step():
        weight.assign_add(weight * 0.5)
        middle = weight.read_value()
        weight.assign_sub(middle * other)
        return weight.read_value(), middle

    rewritten(step, variables)


def test_a_constraint_comes_after_the_update(variables):
    """It assigns what it has made of the variable, and has waited by reading that."""
    weight, other = variables

    def step():
        weight.assign_sub(weight * other)
        weight.assign(tf.clip_by_value(weight, -0.2, 0.2))
        return weight.read_value()

    result, ops = rewritten(step, variables)
    assert result.modified
    assert ops["AssignVariableOp"] == 2
