"""Reads and assignments of variables: what a new TensorFlow breaks."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tf_ooo.compat import keras_variables


def test_reads_on_own_device():
    """Also in a branch, which is a graph of its own."""
    weight = tf.Variable([1.0, 2.0])

    def product():
        return weight * weight

    @tf.function
    def step():
        total = weight + 1.0
        with keras_variables.reads_on_own_device():
            branch = tf.cond(total[0] > 5.0, product, product)
            difference = weight - product()
        return total, difference, branch

    graph_def = step.get_concrete_function().graph.as_graph_def()
    nodes = [*graph_def.node, *(node for each in graph_def.library.function for node in each.node_def)]
    types = {node.name: node.op for node in nodes}
    inputs = [
        (node.op, types[name.split(":")[0]])
        for node in nodes
        if node.op in ("Mul", "Sub", "AddV2")
        for name in node.input
        if types.get(name.split(":")[0], "Const") != "Const"
    ]
    read, passed_on = "ReadVariableOp", "PlaceholderWithDefault"
    assert ("Sub", passed_on) in inputs
    assert ("AddV2", read) in inputs
    assert inputs.count(("Mul", passed_on)) == 3 * 2, (
        "BaseResourceVariable._read_variable_op: bits of an update depend on its variable's device"
    )
    assert ("Mul", read) not in inputs
    assert ("Sub", read) not in inputs
    assert [values.numpy().tolist() for values in step()] == [[2.0, 3.0], [0.0, -2.0], [1.0, 4.0]]


@pytest.mark.parametrize(
    ("name", "sign", "result"), [("assign", 0, 2.0), ("assign_add", 1, 3.0), ("assign_sub", -1, -1.0)]
)
def test_intercepted(name, sign, result):
    """Taken is the first of two assignments; what is read behind it is what was taken."""
    variable, taken = tf.Variable(1.0), []

    def take(of, value, added):
        taken.append((of is variable, added, value))
        return len(taken) == 1

    def step():
        with keras_variables.intercepted(lambda of: taken[-1][2] * 10.0 if taken else None, take):
            getattr(variable, name)(2.0, read_value=False)
            seen = variable + 0.0
            getattr(variable, name)(2.0)
        return seen, variable + 0.0

    seen, left = tf.function(step)()
    assert [each[:2] for each in taken] == [(True, sign)] * 2
    assert (float(seen), float(left), float(variable)) == (20.0, result, result)
    variable.assign_add(1.0)
    assert len(taken) == 2, "BaseResourceVariable.assign: it is intercepted for ever"
