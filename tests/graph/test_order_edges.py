"""Exactly the edges that the order pass adds, and what it says of those that it leaves out."""

from __future__ import annotations

import pytest
from graphs import edge_set, node
from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import PassError, PlanError
from grappler_passes.passes.base import PassResult
from grappler_passes.passes.rewrite_plan import OrderPass, RewritePlan


def chain(*rows):
    """``"name: input input"``."""
    graph = graph_pb2.GraphDef()
    for row in rows:
        name, _, inputs = row.partition(":")
        op = "_Arg" if name.startswith("arg") else "NoOp"
        node(graph, name, op, *inputs.split())
    return graph


def ordered(graph, *edges):
    """(edges added, notes, whether the pass says it changed something)."""
    plan = RewritePlan(edges=tuple(tuple(edge.split(" > ")) for edge in edges))
    result = OrderPass(plan)(graph)
    assert edge_set(graph) <= edge_set(result.graph_def)
    assert [n.name for n in result.graph_def.node] == [n.name for n in graph.node]
    added = {f"{text[1:]} > {name}" for text, name in edge_set(result.graph_def) - edge_set(graph)}
    return added, [(note.status, note.reason, note.nodes) for note in result.notes], result.modified


CYCLE = "closes a cycle with edges that come earlier in the plan"


def test_edges_between_ops_that_know_nothing_of_each_other():
    graph = chain("a", "b", "c", "d")
    assert ordered(graph, "a > b", "a > b", "c > d") == ({"a > b", "c > d"}, [], True)
    assert ordered(graph) == (set(), [], False)


def test_new_inputs_are_control_inputs_behind_the_others():
    graph = chain("a", "b", "c: a", "d: c ^a")
    result = OrderPass(RewritePlan(edges=(("b", "d"),)))(graph)
    assert list(result.graph_def.node[3].input) == ["c", "^a", "^b"]


def test_what_follows_already_is_not_added():
    graph = chain("a", "b: a", "c: b", "d")
    assert ordered(graph, "a > c", "b > c", "a > b") == (set(), [], False)
    assert ordered(graph, "a > d", "b > d", "c > d") == ({"c > d"}, [], True)
    assert ordered(graph, "c > d", "b > d", "a > d") == ({"c > d"}, [], True)
    assert ordered(graph, "d > a", "d > c", "d > b") == ({"d > a"}, [], True)


def test_what_follows_from_the_other_edges_is_not_added():
    graph = chain("a", "b", "c", "d", "e")
    assert ordered(graph, "a > c", "a > b", "b > c") == ({"a > b", "b > c"}, [], True)
    every = [f"{x} > {y}" for i, x in enumerate("edcba") for y in "edcba"[i + 1 :]]
    assert ordered(graph, *every) == ({"e > d", "d > c", "c > b", "b > a"}, [], True)
    # Two ways from a to d: neither follows from the other.
    diamond = {"a > b", "a > c", "b > d", "c > d"}
    assert ordered(graph, *sorted(diamond), "a > d") == (diamond, [], True)


def test_two_sources_of_one_node_of_which_one_covers_the_other():
    """x stands before y in the file, and after it in the graph."""
    graph = chain("x: y", "y: z", "z", "w", "v")
    assert ordered(graph, "z > w", "y > w", "v > w") == ({"y > w", "v > w"}, [], True)
    assert ordered(graph, "v > w", "x > w", "z > w") == ({"x > w", "v > w"}, [], True)


def test_illegal_edges_are_left_out_with_their_reason():
    graph = chain("arg", "a", "b: a", "c")
    backwards = "'b' depends on 'a': the edge would close a cycle"
    assert ordered(graph, "b > a", "a > c") == ({"a > c"}, [("skipped", backwards, ("b", "a"))], True)
    itself = "'c' depends on 'c': the edge would close a cycle"
    assert ordered(graph, "c > c") == (set(), [("skipped", itself, ("c", "c"))], False)
    assert ordered(graph, "a > arg")[1] == [("skipped", "an _Arg takes no inputs", ("a", "arg"))]


def test_an_edge_of_ops_that_are_not_there_is_refused():
    """The step would run, and nobody would know that its order is lost."""
    for edge in ("a > x", "x > a"):
        with pytest.raises(PassError, match="orders 'x', which the graph does not have"):
            ordered(chain("a", "b"), "a > b", edge)


def test_of_edges_that_close_a_cycle_together_the_first_stay():
    graph = chain("a", "b", "c", "d", "e")
    assert ordered(graph, "a > b", "b > a") == ({"a > b"}, [("skipped", CYCLE, ("b", "a"))], True)
    added, notes, _ = ordered(graph, "a > b", "b > c", "c > a", "c > d", "d > e", "e > c")
    assert added == {"a > b", "b > c", "c > d", "d > e"}
    assert notes == [("skipped", CYCLE, ("c", "a")), ("skipped", CYCLE, ("e", "c"))]
    # An op that is no part of a cycle stays wherever it stands in the plan.
    added, notes, _ = ordered(graph, "b > a", "a > b", "a > d", "d > e")
    assert added == {"b > a", "a > d", "d > e"}
    assert notes == [("skipped", CYCLE, ("a", "b"))]


def test_a_cycle_may_lead_through_the_graph():
    graph = chain("a", "b: a", "c", "d: c", "e: d")
    added, notes, _ = ordered(graph, "b > c", "d > a", "e > a")
    assert added == {"b > c"}
    assert notes == [("skipped", CYCLE, ("d", "a")), ("skipped", CYCLE, ("e", "a"))]
    # Both lead from one half to the other: one cycle with the first, none without.
    added, notes, _ = ordered(graph, "d > a", "b > c", "b > e")
    assert added == {"d > a", "b > e"}
    assert notes == [("skipped", CYCLE, ("b", "c"))]
    # An edge inside a cycle that closes none by itself is added after the one that was skipped.
    added, _, _ = ordered(chain("a", "b", "c"), "a > b", "b > a", "a > c", "c > b")
    assert added == {"a > c", "c > b"}


def test_a_pass_that_hides_what_it_did_is_refused():
    graph = chain("a", "b")
    order = OrderPass(RewritePlan())
    changed = chain("a", "b: ^a")
    with pytest.raises(PlanError, match="edges were added and not reported"):
        order.postconditions(graph, PassResult(changed, False), None)
    order.postconditions(graph, PassResult(changed, True), None)
    order.postconditions(graph, PassResult(graph, False), None)


def test_a_graph_with_a_cycle_is_refused():
    with pytest.raises(PassError, match="cycle"):
        OrderPass(RewritePlan())(chain("a: b", "b: a"))
