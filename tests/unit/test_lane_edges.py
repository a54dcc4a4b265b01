"""Tests what a lane adds to small graphs: every edge, join and rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import GraphIndex
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.rewriting.ordering import (
    firsts_of,
    lane_tasks,
    lasts_of,
    ops_of_tasks,
    order_lane,
    order_updates,
    too_late,
)

MEBIBYTE = 1024**2


def index_of(*rows):
    """``"name: input input"``, or ``"name Op: input"``."""
    graph = graph_pb2.GraphDef()
    for row in rows:
        head, _, inputs = row.partition(":")
        name, *op = head.split()
        made = graph.node.add(name=name, op=op[0] if op else "Tanh", input=inputs.split())
        if made.op == "Enter":
            made.attr["frame_name"].s = b"loop"
    return GraphIndex(graph)


def ordered(index, lane, fused=False, sizes=None, name="lane"):
    """``lane`` is ``{task: ops}``, texts both."""
    ops = {Task.parse(task): [index.index[one] for one in names.split()] for task, names in lane.items()}
    return order_lane(index, list(ops), ops, name, fused, sizes)


def test_the_last_ops_of_a_task_come_before_the_first_of_the_next():
    index = index_of("x", "p: x", "q: p", "r: x", "s: r", "t: x")
    order = ordered(index, {"F:0": "p q", "F:0@1": "r s", "dO:0": "t"})
    assert order.edges == [("q", "r"), ("s", "t")]
    assert order.joins == []
    assert order.ranks == {"p": 0, "q": 0, "r": 1, "s": 1, "t": 2}
    alone = ordered(index, {"F:0": "p q"})
    assert (alone.edges, alone.joins, alone.ranks) == ([], [], {"p": 0, "q": 0})
    empty = ordered(index, {})
    assert (empty.edges, empty.joins, empty.ranks) == ([], [], {})


def test_tasks_without_ops_are_looked_through():
    index = index_of("x", "p: x", "q: x")
    order = ordered(index, {"F:0": "p", "dO:1": "", "F:0@1": "q", "dW:1": ""})
    assert (order.edges, order.ranks) == ([("p", "q")], {"p": 0, "q": 1})


@pytest.mark.parametrize(
    ("before", "after", "joined"),
    [
        (1, 1, False),
        (1, 2, False),
        (2, 1, False),
        (1, 5, False),
        (5, 1, False),
        (2, 2, True),
        (2, 3, True),
        (3, 2, True),
    ],
)
def test_many_edges_lead_through_a_join(before, after, joined):
    names = [f"a{i}" for i in range(before)], [f"b{i}" for i in range(after)]
    index = index_of("x", *(f"{name}: x" for name in (*names[0], *names[1])))
    order = ordered(index, {"F:0": " ".join(names[0]), "F:0@1": " ".join(names[1])})
    if joined:
        assert order.joins == ["lane/0"]
        assert sorted(order.edges) == sorted(
            [(a, "lane/0") for a in names[0]] + [("lane/0", b) for b in names[1]]
        )
    else:
        assert order.joins == []
        assert sorted(order.edges) == sorted((a, b) for a in names[0] for b in names[1])


def test_each_join_is_named_after_its_place():
    index = index_of("x", *(f"{a}{i}: x" for a in "abcd" for i in range(2)))
    lane = {"F:0": "a0 a1", "F:0@1": "b0 b1", "F:0@2": "c0", "F:0@3": "d0 d1"}
    assert ordered(index, lane, name="host").joins == ["host/0"]
    lane["F:0@2"] = "c0 c1"
    assert ordered(index, lane, name="host").joins == ["host/0", "host/1", "host/2"]


def test_what_the_graph_orders_already_gets_no_edge():
    index = index_of("x", "l1: x", "l2: x", "f1: l1", "f2: l1 l2", "f3: x")
    assert ordered(index, {"F:0": "l1 l2", "F:0@1": "f2"}).edges == []
    assert ordered(index, {"F:0": "l1 l2", "F:0@1": "f1"}).edges == [("l2", "f1")]
    assert sorted(ordered(index, {"F:0": "l1 l2", "F:0@1": "f1 f2"}).edges) == [("l2", "f1")]
    # l1 is waited for because f3 does not come after it.
    joined = ordered(index, {"F:0": "l1 l2", "F:0@1": "f1 f3"})
    assert sorted(joined.edges) == [("l1", "lane/0"), ("l2", "lane/0"), ("lane/0", "f1"), ("lane/0", "f3")]


def test_what_any_earlier_task_needs_gets_no_edge():
    """``shape`` is an op of the second task, ``late`` of the third, and the first reads both."""
    index = index_of("x", "shape: x", "late: x", "p: shape late", "q: x", "r: x")
    order = ordered(index, {"F:0": "p", "F:0@1": "shape q", "F:0@2": "late r"})
    assert sorted(order.edges) == [("p", "q"), ("q", "r"), ("shape", "r")]
    # The first of a graph counts too.
    order = ordered(index_of("shape", "p: shape", "q: shape"), {"F:0": "p", "F:0@1": "shape q"})
    assert order.edges == [("p", "q")]


def backward():
    """o2 leaves a dO task; w is a dW of its first op, u one of its last."""
    return index_of("x", "o1: x", "o2: o1", "w: o1", "u: o2", "up: o2", "f: x")


def test_fused_what_leaves_a_do_waits_for_its_dw():
    index = backward()
    lane = {"dO:0": "o1 o2", "dW:0": "w", "F:0@1": "f"}
    apart = ordered(index, lane)
    assert apart.edges == [("o2", "w"), ("w", "f")]
    assert apart.ranks == {"o1": 0, "o2": 0, "w": 1, "f": 2}
    fused = ordered(index, lane, fused=True)
    assert fused.edges[0] == ("w", "o2")
    assert sorted(fused.edges[1:]) == [("o2", "f"), ("w", "f")]
    assert fused.ranks == {"o1": 0, "o2": 0, "w": 0, "f": 1}


def test_fused_a_dw_that_reads_what_leaves_is_not_waited_for():
    index = backward()
    assert ("u", "o2") not in ordered(index, {"dO:0": "o1 o2", "dW:0": "u w"}, fused=True).edges
    assert ordered(index, {"dO:0": "o1 o2", "dW:0": "u w"}, fused=True).edges == [("w", "o2")]
    assert ordered(index, {"dO:0": "o1 o2", "dW:0": "u"}, fused=True).edges == []
    # Nothing leaves: o1 is read by the two tasks alone.
    assert ordered(index, {"dO:0": "o1", "dW:0": "w o2 u up"}, fused=True).edges == []


def test_fused_a_dw_that_reads_something_later_is_waited_for():
    """z3 stands behind o2 in the graph's order, and w reads it, not o2."""
    index = index_of("x", "o1: x", "z1: x", "o2: o1", "z2: z1", "z3: z2", "w: o1 z3", "up: o2")
    assert index.position[index.index["z3"]] > index.position[index.index["o2"]]
    assert ordered(index, {"dO:0": "o1 o2", "dW:0": "w"}, fused=True).edges == [("w", "o2")]


def test_fused_only_a_dw_of_the_same_stage_and_microbatch_right_behind():
    index = backward()
    for lane in (
        {"dO:0": "o1 o2", "dW:0@1": "w"},
        {"dO:0": "o1 o2", "dW:1": "w"},
        {"dW:0": "w", "dO:0": "o1 o2"},
        {"F:0": "o1 o2", "dW:0": "w"},
        {"dO:0": "o1 o2", "F:0@1": "f", "dW:0": "w"},
    ):
        assert ordered(index, lane, fused=True) == ordered(index, lane)
    after = ordered(index, {"F:0@1": "f", "dO:0": "o1 o2", "dW:0": "w"}, fused=True)
    assert after.edges == [("f", "o1"), ("w", "o2")]
    assert after.ranks == {"f": 0, "o1": 1, "o2": 1, "w": 1}


def test_fused_many_wait_at_a_join():
    index = index_of("x", "o: x", "o2: o", "o3: o", "w: o", "v: o", "up: o2 o3")
    order = ordered(index, {"dO:0": "o o2 o3", "dW:0": "w v"}, fused=True)
    assert order.joins == ["lane/0/sent"]
    assert sorted(order.edges) == [
        ("lane/0/sent", "o2"), ("lane/0/sent", "o3"), ("v", "lane/0/sent"), ("w", "lane/0/sent"),
    ]  # fmt: skip


def results(*parts):
    """A dO, a dW of some results, and the next forward pass; ``a b>s`` adds up a and b in s."""
    return index_of("x", "o: x", *(f"{p}: o" for p in parts), "f: x")


def test_large_results_one_after_the_other():
    """The second and the third are large; the next task waits for the last of them, and for the small one."""
    index = results("w0", "w1", "w2")
    lane = {"dO:0": "o", "dW:0": "w0 w1 w2", "F:0@1": "f"}
    assert sorted(ordered(index, lane).edges) == [("w0", "f"), ("w1", "f"), ("w2", "f")]
    sizes = {"w0": MEBIBYTE - 1, "w1": MEBIBYTE, "w2": MEBIBYTE + 1, "o": 9 * MEBIBYTE}
    order = ordered(index, lane, sizes=sizes)
    assert sorted(order.edges[:-1]) == [("w0", "f"), ("w2", "f")]
    assert order.edges[-1] == ("w1", "w2")
    three = dict.fromkeys(sizes, MEBIBYTE)
    assert ordered(index, lane, sizes=three).edges == [("w2", "f"), ("w0", "w1"), ("w1", "w2")]
    # A task that is no dW changes nothing, nor does one that is one with its dO.
    other = {"F:1": "o", "dO:0": "w0 w1 w2", "F:0@1": "f"}
    assert ordered(index, other, sizes=three) == ordered(index, other)
    assert ordered(index, lane, True, three) == ordered(index, lane, True)


def test_a_large_sum_waits_with_its_parts():
    """Parts of 0.6 MiB: the sum is large though only they are known; they wait, as does what they read."""
    index = index_of("x", "o: x", "w0: o", "pre: o", "a: pre", "b: o", "s: a b", "f: x")
    lane = {"dO:0": "o", "dW:0": "w0 pre a b s", "F:0@1": "f"}
    sizes = {"w0": MEBIBYTE, "a": 0.6 * MEBIBYTE, "b": 0.6 * MEBIBYTE}
    order = ordered(index, lane, sizes=sizes)
    assert order.edges[0] == ("s", "f")
    assert sorted(order.edges[1:]) == [("w0", "b"), ("w0", "pre")]
    small = ordered(index, lane, sizes=sizes | {"a": 0.3 * MEBIBYTE})
    assert sorted(small.edges) == [("s", "f"), ("w0", "f")]
    # Ops outside the task are no part of its results.
    far = {"dO:0": "o a", "dW:0": "w0 s", "F:0@1": "f"}
    assert ("w0", "s") not in ordered(index, far, sizes=sizes).edges


def test_only_what_nobody_needed_before_waits_for_a_large_result():
    """The first task has made ``pre`` of the second result; what both results need waits for neither."""
    index = index_of("x", "o: x", "both: o", "w0: both", "pre: x", "w1: both pre", "p: pre", "f: x")
    sizes = {"w0": MEBIBYTE, "w1": MEBIBYTE}
    order = ordered(index, {"dO:0": "o p", "dW:0": "both w0 pre w1", "F:0@1": "f"}, sizes=sizes)
    assert order.edges[-1] == ("w0", "w1")
    assert ("p", "both") in order.edges
    assert not any(after == "pre" for _, after in order.edges)


def test_what_the_first_result_needs_does_not_wait_for_it():
    """Also where that is the first op of the graph."""
    index = index_of("both", "o", "pre", "w0: both", "w1: both pre")
    sizes = {"w0": MEBIBYTE, "w1": MEBIBYTE}
    order = ordered(index, {"dO:0": "o", "dW:0": "both w0 pre w1"}, sizes=sizes)
    assert order.edges == [("o", "both"), ("w0", "pre")]


def loop():
    """x goes round a loop; y beside it."""
    return index_of(
        "x", "enter Enter: x", "merge Merge: enter next", "cond LoopCond: merge",
        "switch Switch: merge cond", "body: switch:1", "next NextIteration: body", "exit Exit: switch",
        "y: x", "z: exit",
    )  # fmt: skip


def named(index, nodes):
    return sorted(index.names[i] for i in nodes)


def test_a_loop_begins_with_what_enters_it_and_ends_with_its_exit():
    index = loop()
    inside = [index.index[n] for n in ["enter", "merge", "cond", "switch", "body", "next", "exit"]]
    assert named(index, firsts_of(index, inside)) == ["enter"]
    # Its exit is dead in all iterations but the last, in which what waits for it goes on.
    assert named(index, lasts_of(index, inside)) == ["exit"]
    assert named(index, lasts_of(index, [*inside, index.index["z"]])) == ["z"]
    middle = [index.index[n] for n in ["merge", "switch", "body", "next"]]
    assert firsts_of(index, middle) == lasts_of(index, middle) == []
    text = "enter merge cond switch body next exit z"
    assert ordered(index, {"F:0": "y", "F:0@1": text}).edges == [("y", "enter")]
    assert ordered(index, {"F:0": text, "F:0@1": "y"}).edges == [("z", "y")]
    # A loop in a dO task: what is inside cannot wait.
    fused = ordered(index, {"dO:0": text, "dW:0": "y"}, fused=True)
    assert not any(after in ("merge", "body", "switch", "next") for _, after in fused.edges)


def test_a_branch_is_not_waited_for():
    index = index_of("x", "p: x", "switch Switch: x p", "then: switch:1", "merge Merge: then switch", "y: x")
    text = "p switch then merge"
    assert named(index, lasts_of(index, [index.index[n] for n in text.split()])) == ["merge"]
    assert lasts_of(index, [index.index["then"]]) == []
    assert ordered(index, {"F:0": text, "F:0@1": "y"}).edges == [("merge", "y")]


def step_of(index, where, sums=(), joined=(), turn_of=()):
    turns = [dict(turn_of).get(name, 0) for name in index.names]
    return SimpleNamespace(
        index=index, where=where, turns=turns, sums=frozenset(sums), joined=frozenset(joined)
    )


def test_ops_of_each_task():
    index = index_of(
        "h VarHandleOp", "c Const", "x _Arg", "log: x ^write", "f: x c", "g: f", "w0: g", "w1: g",
        "sum: w0 w1", "both: w0 w1", "read ReadVariableOp: h", "new: sum read",
        "write AssignVariableOp: h new", "stray: x", "early ReadVariableOp: h",
    )  # fmt: skip
    where = {
        "c": ("F", 0, 0), "f": ("F", 0, 0), "g": ("F", 1, 1), "w0": ("dW", 1, 0), "w1": ("dW", 2, 1),
        "sum": ("dW", 2, 1), "both": ("dW", 1, 1), "read": ("U", 1, 2), "new": ("U", 2, 2),
        "write": ("U", 2, 2), "log": ("F", 2, 1), "early": ("U", 0, 2),
    }  # fmt: skip
    step = step_of(index, where, ["sum"], ["both"])
    tasks = ops_of_tasks(step, [0, 0, 1], too_late(step))
    names = {str(task): [index.names[i] for i in nodes] for task, nodes in tasks.items()}
    position = {name: index.position[index.index[name]] for name in index.names}
    assert {task: sorted(nodes) for task, nodes in names.items()} == {
        "F:0": ["f"], "F:0@1": ["g"], "dW:0": ["w0"], "dW:1@1": ["w1"], "U:0": ["early", "read"],
        "U:1": ["new", "write"],
    }  # fmt: skip
    assert all(nodes == sorted(nodes, key=position.__getitem__) for nodes in names.values())


def test_ops_that_read_after_an_update_only():
    """A read of a variable is no update: what comes after it is ordered."""
    index = index_of(
        "h VarHandleOp", "read ReadVariableOp: h", "f: read", "write AssignVariableOp: h f", "g: f ^write"
    )
    where = {"read": ("U", 0, 1), "f": ("F", 0, 0), "write": ("U", 0, 1), "g": ("F", 0, 0)}
    assert named(index, too_late(step_of(index, where))) == ["g"]
    assert too_late(step_of(index, where | {"write": ("F", 0, 0)})) == set()


def test_an_op_that_waits_for_an_update_ends_nothing():
    """An op behind it in the graph's order belongs to its task all the same."""
    index = index_of("h VarHandleOp", "write AssignVariableOp: h h", "log: h ^write", "a: h", "b: a", "c: b")
    where = {"write": ("U", 0, 1), "log": ("F", 0, 0), "c": ("F", 0, 0)}
    assert index.position[index.index["log"]] < index.position[index.index["c"]]
    assert named(index, too_late(step_of(index, where))) == ["log"]


def test_a_forward_op_that_waits_for_the_backward_pass_is_in_no_task():
    """Only the backward pass of its own micro-batch counts: the next one's op may well wait for it."""
    index = index_of("x", "f: x", "o: f", "w: f o", "log: f ^w", "next: x ^o", "seen: w")
    where = {"f": ("F", 0, 0), "o": ("dO", 0, 0), "w": ("dW", 0, 0), "log": ("F", 0, 0)}
    where |= {"next": ("F", 0, 1), "seen": ("dW", 0, 0)}
    assert named(index, too_late(step_of(index, where))) == ["log"]
    only = index_of("x", "f: x", "o: f", "log: f ^o")
    assert named(only, too_late(step_of(only, {"o": ("dO", 0, 0), "log": ("F", 0, 0)}))) == ["log"]


def test_ops_of_a_later_turn_come_behind_the_updates_of_earlier_ones():
    index = index_of(
        "h VarHandleOp", "x _Arg", "write AssignVariableOp: h x", "f: x ^write", "g: x ^write",
        "again AssignVariableOp: h g", "late: x ^again", "end: x",
    )  # fmt: skip
    turn_of = {"g": 1, "again": 1, "late": 1, "end": 2}
    where = dict.fromkeys(("f", "g", "late", "end"), ("F", 0, 0))
    where |= {"write": ("U", 0, 1), "again": ("U", 0, 1)}
    assert named(index, too_late(step_of(index, where, turn_of=turn_of))) == ["end", "f", "late"]


def updates_of(sizes, devices=("d", "d", "d"), turn_of=()):
    """Three layers; the middle of each one's update is of that many bytes.  All wait for a common norm."""
    index = index_of(
        "a VarHandleOp", "b VarHandleOp", "c VarHandleOp", "g", "norm: g",
        *(f"new_{v}: g norm" for v in "abc"), *(f"scaled_{v}: new_{v}" for v in "abc"),
        *(f"write_{v} AssignVariableOp: {v} scaled_{v}" for v in "abc"),
    )  # fmt: skip
    where = {
        f"{op}_{v}": ("U", layer, 1) for layer, v in enumerate("abc") for op in ("new", "scaled", "write")
    }
    step = step_of(index, where | {"g": ("dW", 0, 0), "norm": ("U", 0, 1)}, turn_of=turn_of)
    orders = order_updates(
        step, devices, "join", {f"new_{v}": size for v, size in zip("abc", sizes, strict=True)}
    )
    return {device: (order.edges, order.joins) for device, order in orders.items()}


def test_large_updates_of_a_device_run_one_after_the_other():
    """The highest layer's first; what all need waits for none."""
    large = [MEBIBYTE] * 3
    assert updates_of(large) == {"d": ([("write_c", "new_b"), ("write_b", "new_a")], [])}
    later = updates_of(large, turn_of={"new_c": 1, "scaled_c": 1, "write_c": 1})
    assert later == {"d": ([("write_b", "new_a"), ("write_a", "new_c")], [])}
    apart = updates_of(large, ("d", "e", "d"))
    assert apart == {"d": ([("write_c", "new_a")], []), "e": ([], [])}


def test_small_updates_wait_for_nobody():
    assert updates_of([MEBIBYTE, 100, MEBIBYTE]) == {"d": ([("write_c", "new_a")], [])}
    assert updates_of([0, 0, MEBIBYTE]) == {"d": ([], [])}


def test_tasks_of_each_lane():
    text = "tf_ooo schedule v1\nmode pipeline\npolicy p\nmicrobatches 3\n"
    text += "lane 1 0: F:1@0 F:1@1 dO:1@0 dW:1@0 U:1@0 F:1@2\nlane 2 1: comm:0@0\nlane 0 0: F:0@2 dO:0@1\n"
    lanes = [(device, " ".join(map(str, tasks))) for device, tasks in lane_tasks(Schedule.from_text(text), 2)]
    assert lanes == [(0, "dO:0@1"), (1, "F:1 F:1@1 dO:1 dW:1"), (2, "")]
