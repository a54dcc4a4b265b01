"""Tests which reads of a variable go through the same registers."""

from __future__ import annotations

import types

import tensorflow as tf

from grappler_passes.graph.dependencies import GraphIndex
from tf_ooo.modes.layerpipe.delays import _same_reads


def reads_around_a_write():
    """A variable that is read twice, written, and read again, as a seed that two layers share."""
    graph = tf.Graph()
    with graph.as_default():
        handle = tf.compat.v1.placeholder(tf.resource, [], "state")
        before = [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32, name=name)
            for name in ("before", "again")
        ]
        with tf.control_dependencies(before):
            write = tf.raw_ops.AssignAddVariableOp(resource=handle, value=1.0, name="write")
        with tf.control_dependencies([write]):
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32, name="after")
    return types.SimpleNamespace(index=GraphIndex(graph.as_graph_def()))


def same_reads(**rounds):
    return _same_reads(reads_around_a_write(), types.SimpleNamespace(of=rounds))


def test_reads_before_and_after_a_write_are_two():
    same = same_reads(before=0, again=0, write=0, after=0)
    assert same == {"before": "before", "again": "before", "after": "after"}


def test_reads_in_two_rounds_are_two():
    same = same_reads(before=0, again=1, write=1, after=1)
    assert same == {"before": "before", "again": "again", "after": "after"}
