"""Runs of tasks on random graphs: whatever the graph, calls made of them close no cycle."""

from __future__ import annotations

import graphlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grappler_passes.graph.dependencies import GraphIndex
from tests.graph.graphs import graph_of
from tf_ooo.rewriting.task_calls import TaskKey, keys_of, runs

TASKS = (None, 0, 1, 2)  # 0 is a task like others


@st.composite
def graphs(draw, most=12):
    """(edges, each node's task, constants that calls have copies of); edges go to higher numbers."""
    count = draw(st.integers(1, most))
    pairs = [(first, then) for then in range(count) for first in range(then)]
    edges = [pair for pair in pairs if draw(st.booleans())] if draw(st.booleans()) else []
    edges = edges or draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    task_of = [draw(st.sampled_from(TASKS)) for _ in range(count)]
    copied = {i for i, task in enumerate(task_of) if task is None and draw(st.booleans())}
    return edges, task_of, copied


def index_of(edges, count):
    """The graph of these edges."""
    rows = [
        f"n{i} NoOp: {' '.join(f'^n{first}' for first, then in edges if then == i)}" for i in range(count)
    ]
    return GraphIndex(graph_of(*rows))


def counted(edges, task_of, copied):
    """The edges that hold between calls: a copy inside waits for nothing."""
    return [(first, then) for first, then in edges if first not in copied or task_of[then] is None]


def contracted(edges, group_of):
    """The edges between groups; raises CycleError where they close a cycle."""
    sorter = graphlib.TopologicalSorter()
    for first, then in edges:
        if group_of[first] != group_of[then]:
            sorter.add(group_of[then], group_of[first])
    sorter.prepare()


DIVIDED = ([(0, 1), (1, 2)], [1, None, 1], set())  # leaves its task and comes back
CROSSED = ([(0, 3), (2, 1)], [1, 1, 2, 2], set())  # each task waits for the other
COPIED = ([(0, 1), (1, 2)], [1, None, 1], {1})  # comes back through a constant only


@given(graphs())
@example(DIVIDED)
@example(CROSSED)
@example(COPIED)
@settings(max_examples=300)
def test_runs_hold_each_op_once_and_close_no_cycle(graph):
    edges, task_of, copied = graph
    in_order = runs(index_of(edges, len(task_of)), task_of, copied)
    ops = [i for _, run in in_order for i in run]
    assert sorted(ops) == [i for i, task in enumerate(task_of) if task is not None]
    assert all(task_of[i] == task for task, run in in_order for i in run)
    held, place = counted(edges, task_of, copied), {i: place for place, i in enumerate(ops)}
    assert all(place[first] < place[then] for first, then in held if {first, then} <= place.keys())
    group_of = {i: ("run", number) for number, (_, run) in enumerate(in_order) for i in run}
    contracted(held, {i: group_of.get(i, i) for i in range(len(task_of))})


@given(graphs())
@settings(max_examples=300)
def test_a_task_is_one_run_where_all_tasks_can_be(graph):
    edges, task_of, copied = graph
    groups = {i: ("op", i) if task is None else ("task", task) for i, task in enumerate(task_of)}
    try:
        contracted(counted(edges, task_of, copied), groups)
    except graphlib.CycleError:
        return
    in_order = [task for task, _ in runs(index_of(edges, len(task_of)), task_of, copied)]
    assert len(in_order) == len(set(in_order))


@pytest.mark.parametrize(
    ("graph", "sizes"),
    [
        pytest.param(DIVIDED, {1: [1, 1]}, id="leaves and comes back"),
        pytest.param(CROSSED, {1: [1, 1], 2: [2]}, id="one of two is divided"),
        pytest.param(COPIED, {1: [2]}, id="a constant divides nothing"),
    ],
)
def test_what_has_to_be_divided(graph, sizes):
    edges, task_of, copied = graph
    in_order = {}
    for task, run in runs(index_of(edges, len(task_of)), task_of, copied):
        in_order.setdefault(task, []).append(len(run))
    assert sorted(map(sorted, in_order.values())) == sorted(map(sorted, sizes.values()))


@pytest.mark.parametrize(("first", "other"), [(0, 1), (1, 0)])
def test_a_task_that_has_to_be_divided_is_divided_first(first, other):
    """Task 1 leaves and comes back; task 2, one of whose ops could start at once, reads its end."""
    edges = [(first, 2), (2, 3), (3, 4), (other, 4)]
    task_of = [None, None, None, 1, 2]
    task_of[first], task_of[other] = 1, 2
    in_order = runs(index_of(edges, 5), task_of, set())
    assert [(task, len(run)) for task, run in in_order] == [(1, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize("fused", [False, True])
def test_keys(fused):
    where = {"f": ("F", 2, 1), "o": ("dO", 2, 1), "w": ("dW", 2, 1), "u": ("U", 1, 3)}
    keys = keys_of(where, (0, 0, 1), fused)
    assert keys["f"] == TaskKey("F", 1, 1)
    assert keys["w"] == (keys["o"] if fused else TaskKey("dW", 1, 1, 2))
    assert keys["u"] == TaskKey("U", 0, 0), "updates are of no micro-batch"
