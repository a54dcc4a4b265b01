"""Tests which turn of a step a node belongs to, by marks and by what it reads."""

from __future__ import annotations

from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.steps import STEP_ATTR, TURN_ATTR, steps_of, turns_of
from grappler_passes.graph.dependencies import GraphIndex

ONCE = 2


def graph_of(nodes):
    """``{name: (inputs, micro-batch or None, turn or None)}``."""
    graph_def = graph_pb2.GraphDef()
    for name, (inputs, step, turn) in nodes.items():
        node = graph_def.node.add(name=name, op="NoOp", input=[f"^{text}" for text in inputs])
        for attribute, value in ((STEP_ATTR, step), (TURN_ATTR, turn)):
            if value is not None:
                node.attr[attribute].i = value
    return graph_def


def turns(graph_def):
    index = GraphIndex(graph_def)
    turn_of_node = turns_of(graph_def, index, steps_of(graph_def, index), ONCE)
    return dict(zip(index.names, turn_of_node, strict=True))


def test_steps_without_turns_have_one():
    nodes = {"a": ([], 0, None), "update": (["a"], ONCE, None), "b": (["update"], 1, None)}
    assert set(turns(graph_of(nodes)).values()) == {0}


def test_what_is_not_marked_comes_after_what_it_reads():
    nodes = {
        "first": ([], 0, 0),
        "of_first": (["first"], 0, None),
        "update": (["of_first"], ONCE, 0),
        "of_update": (["update"], ONCE, None),
        "second": (["first"], 0, 1),
        "reads_updated": (["of_update"], 0, None),
        "of_both": (["of_first", "second"], 1, None),
        "behind": (["reads_updated", "of_both"], 1, None),
    }
    expected = [0, 0, 0, 0, 1, 1, 1, 1]
    assert turns(graph_of(nodes)) == dict(zip(nodes, expected, strict=True))
