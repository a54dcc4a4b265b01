"""A function traced flat: its arguments, what it captures, its results, its graph in another function."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ooo.compat import func_graphs, tf_functions
from tf_ooo.errors import BackendError
from tf_ooo.tracing.flat import FlatTrace


def scaled():
    """A variable, and the trace of a function that reads it and returns a nest."""
    factor = tf.Variable(3.0)
    trace = FlatTrace(
        lambda batch: {"none": None, "sum": batch["x"] * factor + batch["y"], "three": 3},
        [{"x": tf.TensorSpec([2]), "y": tf.TensorSpec([2])}],
    )
    return factor, trace


def test_arguments_and_captures_are_told_apart():
    factor, trace = scaled()
    assert len(trace.arguments) == 2
    (outside,) = trace.captured.values()
    assert outside is factor.handle
    assert not set(trace.arguments) & set(trace.captured)
    placeholders = {node.name for node in trace.graph_def().node if node.op == "Placeholder"}
    assert placeholders == {*trace.arguments, *trace.captured}


def test_results_come_back_as_they_were_returned():
    _factor, trace = scaled()
    assert len(trace.fetches) == 2
    body = func_graphs.without_placeholders(trace.graph_def())
    arguments, captured = trace.arguments, trace.captured

    def run(x, y):
        given = dict(zip(arguments, (x, y), strict=True)) | captured
        return func_graphs.import_here(body, {f"{name}:0": t for name, t in given.items()}, trace.fetches)

    fetched = tf_functions.plain_function(run, [tf.TensorSpec([2])] * 2)(tf.constant([1.0, 2.0]), tf.ones(2))
    results = trace.unpack(fetched)
    assert results["none"] is None
    assert int(results["three"]) == 3
    np.testing.assert_array_equal(results["sum"], [4.0, 7.0])


def test_a_function_without_results_has_one_to_ask_for():
    trace = FlatTrace(lambda x: None, [tf.TensorSpec([2])])
    assert len(trace.fetches) == 1
    assert trace.unpack([tf.constant(0.0)]) is None


def test_values_that_only_a_call_could_tell():
    def reads(x):
        graph = tf.compat.v1.get_default_graph()
        return x + graph.capture_call_time_value(lambda: tf.constant(1.0), tf.TensorSpec([]), key="later")

    with pytest.raises(BackendError, match="only known when it is called"):
        _ = FlatTrace(reads, [tf.TensorSpec([2])]).captures
