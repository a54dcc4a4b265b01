from __future__ import annotations

import pytest
import tensorflow as tf
from graphs import context_of, flat, node
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import GraphError
from grappler_passes.graph.dependencies import GraphIndex


def chain(*rows):
    graph = graph_pb2.GraphDef()
    for name, *inputs in rows:
        node(graph, name, "NoOp", *inputs)
    return graph


def test_order_ancestors_and_implied():
    index = GraphIndex(chain(("d", "b", "^c"), ("b", "a:1"), ("c", "a"), ("a",), ("e",)))
    order = [index.names[i] for i in index.order]
    assert order.index("a") < order.index("b") < order.index("d")
    assert {name for name in index.names if index.implied(name, "d")} == {"a", "b", "c"}
    assert index.implied("a", "d")
    assert not index.implied("d", "a")
    assert not index.implied("e", "d")
    assert not index.implied("d", "d")
    assert index.data_preds[index.of("b")] == [(index.of("a"), 1)]


@pytest.mark.parametrize(
    ("graph", "match"),
    [
        (chain(("a", "b"), ("b", "a")), "cycle"),
        (chain(("a",), ("a",)), "duplicate"),
        (chain(("a", "x")), "names no node"),
    ],
)
def test_malformed_graphs_name_a_node(graph, match):
    with pytest.raises(GraphError, match=match) as caught:
        GraphIndex(graph)
    assert caught.value.node in ("a", "b")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30))
def test_reachability_agrees_with_search(pairs):
    inputs = {i: {a for a, b in pairs if b == i and a < b} for i in range(12)}
    index = GraphIndex(chain(*((f"n{i}", *(f"n{p}" for p in preds)) for i, preds in inputs.items())))
    for i in range(12):
        seen, todo = set(), [i]
        while todo:
            todo += [p for p in inputs[todo.pop()] - seen if not seen.add(p)]
        assert {p for p in range(12) if index.implied(f"n{p}", f"n{i}")} == seen


@tf.function
def conditional(x):
    with tf.name_scope("first"):
        y = tf.exp(x)
    return tf.cond(x[0] > 0, lambda: tf.sin(y) + tf.tan(x), lambda: tf.cos(y)) * 2.0


@tf.function
def loop(x):
    result = tf.while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, tf.sin(v) + tf.cos(v)), (0, x))
    return result[1] + tf.exp(x)


def by_op(graph_def, op):
    return next(made.name for made in graph_def.node if made.op == op)


def test_branches_of_a_lowered_cond():
    graph_def, _, _ = flat(conditional, tf.TensorSpec([3]))
    index = GraphIndex(graph_def)
    sin, tan, cos = (by_op(graph_def, op) for op in ("Sin", "Tan", "Cos"))
    before, after = by_op(graph_def, "Exp"), by_op(graph_def, "Mul")
    assert len(context_of(index, sin).branches) == 1
    assert (
        context_of(index, sin).branches == context_of(index, tan).branches != context_of(index, cos).branches
    )
    assert context_of(index, before).branches == context_of(index, after).branches == frozenset()
    assert index.edge_is_legal(sin, tan) == (True, "")
    assert not index.edge_is_legal(sin, cos)[0]
    free = next(made.name for made in graph_def.node if made.op == "Mul")
    legal, reason = index.edge_is_legal(cos, free)
    assert not legal
    assert "dead" in reason
    legal, reason = index.edge_is_legal(free, sin)
    assert not legal
    assert "cycle" in reason


def test_frames_of_a_lowered_loop():
    graph_def, _, _ = flat(loop, tf.TensorSpec([3]))
    index = GraphIndex(graph_def)
    sin, cos, outside = (by_op(graph_def, op) for op in ("Sin", "Cos", "Exp"))
    assert context_of(index, sin).frame != ()
    assert context_of(index, outside).frame == ()
    assert index.edge_is_legal(sin, cos) == (True, "")
    assert "frames" in index.edge_is_legal(outside, sin)[1]
    assert "frames" in index.edge_is_legal(sin, outside)[1]
    assert "one iteration" in index.edge_is_legal(by_op(graph_def, "Enter"), sin)[1]
    assert "one iteration" in index.edge_is_legal(by_op(graph_def, "NextIteration"), sin)[1]
    assert "Merge" in index.edge_is_legal(by_op(graph_def, "LoopCond"), by_op(graph_def, "Merge"))[1]
    # The condition runs once more than the body: the body may wait for it, not the other way round.
    assert not index.edge_is_legal(sin, by_op(graph_def, "LoopCond"))[0]
    ends = [made.name for made in graph_def.node if made.op == "Exit"]
    assert all(context_of(index, name).output_frame == () for name in ends)
    # Behind a loop all may wait for its end: the branch that ends it is inside.
    assert all(context_of(index, name).branches for name in ends)
    assert all(not context_of(index, name).output_branches for name in ends)
    behind = [made.name for made in graph_def.node if any(text.split(":")[0] in ends for text in made.input)]
    assert all(index.edge_is_legal(ends[0], name) == (True, "") for name in behind)


def test_a_loop_comes_after_its_body():
    graph_def, _, _ = flat(loop, tf.TensorSpec([3]))
    index = GraphIndex(graph_def)
    sin = by_op(graph_def, "Sin")
    adds = [made.name for made in graph_def.node if made.op == "AddV2"]
    end = next(name for name in adds if not context_of(index, name).frame)
    # There is a way only over the back edge of the loop.
    assert index.implied(sin, end)
    for enter in (made for made in graph_def.node if made.op == "Enter"):
        source = enter.input[0]
        if not index.data_preds[index.of(source)]:
            assert not index.edge_is_legal(end, source)[0]


def test_arguments_and_unknown_nodes_take_no_edges():
    graph = graph_pb2.GraphDef()
    node(graph, "arg", "_Arg")
    node(graph, "a")
    index = GraphIndex(graph)
    assert not index.edge_is_legal("a", "arg")[0]
    assert "nobody" in index.edge_is_legal("a", "nobody")[1]
    assert not index.edge_is_legal("a", "a")[0]
