"""Functions that a rewrite has TensorFlow compile are not rewritten; a slow rewrite says where it stands."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes import plugin
from grappler_passes.compat import graph_protos, runtime
from grappler_passes.plugin import callback


@pytest.fixture(scope="module", autouse=True)
def loaded():
    plugin.load()


def step_of(weight):
    @tf.function
    def step(x):
        weight.assign_sub(0.1 * x)
        return tf.reduce_sum(weight)

    return step


def run_with(rewrite, name):
    """Runs a function in whose graph's rewriting ``rewrite`` is called."""
    request = plugin.register(plugin.Request(name, rewrite))
    try:
        with plugin.tracing(request):
            assert float(step_of(tf.Variable(1.0))(2.0)) == np.float32(0.8)
    finally:
        plugin.unregister(request.id)
    assert request.errors == []
    return request


def test_functions_that_a_rewrite_compiles_are_left_as_they_are():
    """They are traced within the request, on the thread that rewrites."""
    inner = []

    def rewrite(graph_def):
        inner.append(float(step_of(tf.Variable(5.0))(1.0)))

    request = run_with(rewrite, "nested")
    assert inner == [np.float32(4.9)]
    assert request.calls == 2, (
        "TensorFlow asks twice about the one graph, and about none of the rewrite's own"
    )


def test_a_marked_graph_is_inlined_without_asking_for_its_rewriting():
    weight = tf.Variable(1.0)
    request = plugin.register(plugin.Request("inlined", lambda graph_def: pytest.fail("asked")))
    try:
        with plugin.tracing(request):
            step = step_of(weight).get_concrete_function(tf.TensorSpec(()))
        graph_def, names = runtime.graph_def_of(step)
        flat = graph_protos.inline_graph_def(graph_def, list(names))
    finally:
        plugin.unregister(request.id)
    assert any(node.op == "AssignSubVariableOp" for node in flat.node)
    assert (request.calls, request.errors) == (0, [])


def test_a_slow_rewrite_says_once_where_it_stands(monkeypatch, caplog):
    monkeypatch.setattr(callback, "EXPECTED_S", 0.3)
    monkeypatch.setattr(callback, "EXPECTED_S_PER_OP", 0.0)

    def wait_here(graph_def):
        while not caplog.records:
            time.sleep(0.01)

    run_with(wait_here, "slow")
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("slow: rewriting a graph of")
    assert "wait_here" in text


def test_a_quick_rewrite_says_nothing(caplog):
    run_with(lambda graph_def: None, "quick")
    assert caplog.records == []
