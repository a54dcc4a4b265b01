"""Tasks of small graphs, and all the edges that put them in a schedule's order."""

from __future__ import annotations

import pytest

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph
from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.rewriting.lowering import dependencies, execution_order, lower, task_ops

F, DO, DW, U, OTHER = (OpKind.FORWARD, OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.UPDATE, OpKind.OTHER)


def op(name, kind, *inputs, layer=None, type="Any"):
    data = tuple((source, 0) for source in inputs if source[0] != "^")
    control = tuple(source[1:] for source in inputs if source[0] == "^")
    return Op(name, type, kind, layer=layer, inputs=data, control_inputs=control)


def graph_of(ops, weight_grads, updates=None):
    layers = tuple(
        Layer(i, (f"v{i}",), tuple(names), tuple((updates or {}).get(i, ())))
        for i, names in enumerate(weight_grads)
    )
    return TrainingGraph({o.name: o for o in ops}, layers, ())


def schedule(*lanes):
    """Lanes of one device; ``"dO:1 dW:1"`` is a lane."""
    tasks = {(0, i): TaskList([Task.parse(word) for word in lane.split()]) for i, lane in enumerate(lanes)}
    return Schedule("single_device", "byhand", tasks)


def network():
    """Three layers; the shape of y, a constant and a control input are parts of the backward pass too."""
    ops = [
        op("x", F),
        op("y", F, "x"),
        op("one", DO, type="Const"),
        op("shape", DO, "y"),
        op("dy", DO, "y", "one"),
        op("noise", OTHER),
        op("axis", DW, type="Const"),
        op("b2", DW, "dy", "axis", layer=2),
        op("w2", DW, "dy", "y", layer=2),
        op("dx1", DO, "dy", "^shape", "gone"),
        op("w1", DW, "dx1", layer=1),
        op("dx0", DO, "dx1"),
        op("w0", DW, "dx0", layer=0),
        op("n0", DW, "w0", layer=0),
        op("u2", U, "w2", "b2", layer=2),
        op("u1", U, "w1", layer=1),
        op("u0", U, "n0", layer=0),
    ]
    updates = {0: ["u0"], 1: ["u1"], 2: ["u2"]}
    return graph_of(ops, [["w0", "n0"], ["w1"], ["axis", "b2", "w2", "left_out"]], updates)


def waits(dag):
    """Return what each op waits for."""
    return {dag[i]: [dag[j] for j in dag.predecessor_indices(i)] for i in dag.node_indices()}


ORDER = "dO:2 dO:1 dW:2 dO:0 dW:1 dW:0"


def test_tasks_of_a_network():
    tasks = task_ops(network())
    assert tasks.ops == {
        Task("dW", 0): ("w0", "n0"),
        Task("dW", 1): ("w1",),
        Task("dW", 2): ("b2", "w2"),
        Task("dO", 2): ("dy",),
        Task("dO", 1): ("shape", "dx1"),
        Task("dO", 0): ("dx0",),
    }
    assert tasks.backward_layers == (2, 1, 0)
    assert waits(tasks.dag) == waits(dependencies(network()))


def test_of_layers_that_read_one_do_the_higher_has_it():
    """A layer that reads none comes before all."""
    ops = [op("dy", DO), op("w0", DW, "dy"), op("w1", DW, "dy"), op("w2", DW), op("w3", DW)]
    tasks = task_ops(graph_of(ops, [["w0"], ["w1"], ["w2"], ["w3"]]))
    assert tasks.ops == {
        Task("dO", 1): ("dy",),
        Task("dW", 0): ("w0",),
        Task("dW", 1): ("w1",),
        Task("dW", 2): ("w2",),
        Task("dW", 3): ("w3",),
    }
    assert tasks.backward_layers == (3, 2, 1, 0)
    # The last of several dO that a layer reads says how far it is from the loss.
    ops = [op("a", DO), op("b", DO, "a"), op("c", DO, "b"), op("w0", DW, "a", "c"), op("w1", DW, "b")]
    tasks = task_ops(graph_of(ops, [["w0"], ["w1"]]))
    assert tasks.backward_layers == (1, 0)
    assert tasks.ops[Task("dO", 1)] == ("a", "b")
    assert tasks.ops[Task("dO", 0)] == ("c",)


def test_edges_of_a_lane():
    """From the last ops of a block to the first of the next; dO tasks in a row are one block."""
    notes = []
    plan = lower(schedule(ORDER), network(), notes=notes)
    assert plan.edges == (
        ("dx1", "b2"), ("dx1", "w2"),
        ("b2", "dx0"), ("w2", "dx0"),
        ("dx0", "w1"),
        ("w1", "w0"),
    )  # fmt: skip
    assert notes == []
    later = lower(schedule("dO:2 dW:2 dO:1 dO:0 dW:1 dW:0"), network())
    assert later.edges == (
        ("dy", "b2"), ("dy", "w2"),
        ("b2", "shape"), ("w2", "shape"),
        ("dx0", "w1"),
        ("w1", "w0"),
    )  # fmt: skip


def test_what_the_plan_says_of_each_op():
    """Without the ops that serve nothing; a second stream counts from 0 again."""
    plan = lower(schedule("dO:2 dO:1 dO:0", "dW:2 dW:1 dW:0"), network())
    assert plan.edges == (("b2", "w1"), ("w2", "w1"), ("w1", "w0"))
    names = [name for name in network().ops if name != "noise"]
    assert list(plan.kinds) == list(plan.streams) == list(plan.priorities) == names
    assert plan.kinds["dx1"] == "dO"
    assert plan.kinds["one"] == "dO"
    assert plan.kinds["u1"] == "U"
    assert dict(plan.layers) == {
        "w0": 0, "n0": 0, "w1": 1, "w2": 2, "b2": 2, "u0": 0, "u1": 1, "u2": 2,
    }  # fmt: skip
    assert {name for name, stream in plan.streams.items() if stream} == {"w0", "n0", "w1", "w2", "b2"}
    assert set(plan.streams.values()) == {0, 1}
    assert {name: rank for name, rank in plan.priorities.items() if rank} == {
        "shape": 1, "dx1": 1, "dx0": 2, "w1": 1, "w0": 2, "n0": 2,
    }  # fmt: skip


def test_forwards_and_updates_stay_where_the_graph_has_them():
    plan = lower(schedule(f"F:0 F:1 F:2 {ORDER} U:0 U:1 U:2"), network())
    assert plan.edges == lower(schedule(ORDER), network()).edges
    assert plan.priorities["dx1"] == 1


def test_the_tasks_are_exactly_the_graphs():
    with pytest.raises(ScheduleError, match="missing: dO:0 is in the training graph"):
        lower(schedule("dO:2 dO:1 dW:2 dW:1 dW:0"), network())
    with pytest.raises(ScheduleError, match="unknown op dW:3 is"):
        lower(schedule(ORDER + " dW:3"), network())
    assert lower(schedule(ORDER), network(), task_ops(network())) == lower(schedule(ORDER), network())


def test_what_any_earlier_block_needs_gets_no_edge():
    """dO:1 comes last and has run long before; dO:0 reads it."""
    ops = [op("x", F), op("dy", DO, "x"), op("dx", DO, "dy"), op("w0", DW, "dx"), op("z0", DW)]
    ops += [op("w1", DW, "dy")]
    graph = graph_of(ops, [["w0", "z0"], ["w1"]])
    assert lower(schedule("dO:0 dW:0 dO:1 dW:1"), graph).edges == (
        ("dx", "w0"), ("dx", "z0"), ("dy", "w1"),
    )  # fmt: skip
    assert lower(schedule("dO:1 dW:1 dO:0 dW:0"), graph).edges == (
        ("dy", "w1"), ("w1", "dx"), ("dx", "w0"), ("dx", "z0"),
    )  # fmt: skip


def wide(before, after):
    """Two layers with so many dW ops each, all of which read one dO."""
    ops = [op("dy", DO)]
    ops += [op(f"a{i}", DW, "dy") for i in range(before)] + [op(f"b{i}", DW, "dy") for i in range(after)]
    names = [[f"b{i}" for i in range(after)], [f"a{i}" for i in range(before)]]
    return graph_of(ops, names)


@pytest.mark.parametrize(
    ("before", "after", "from_last"),
    [
        (8, 8, 8),
        (64, 1, 64),
        (65, 1, 64),
        (9, 8, 8),
        (10, 10, 6),
        (3, 33, 1),
        (2, 64, 1),
        (2, 70, 1),
        (1, 70, 1),
    ],
)
def test_many_edges_are_fewer(before, after, from_last):
    """Sixty-four at most between two blocks, or one from the last op to each."""
    notes = []
    edges = lower(schedule("dO:1 dW:1 dW:0"), wide(before, after), notes=notes).edges
    between = [(a, b) for a, b in edges if a != "dy"]
    lasts = [f"a{i}" for i in range(before)][-from_last:]
    assert between == [(a, f"b{i}") for a in lasts for i in range(after)]
    assert [(a, b) for a, b in edges if a == "dy"] == [("dy", f"a{i}") for i in range(before)]
    if from_last == before:
        assert notes == []
        return
    assert notes == [
        f"'b0' may begin before the task in front of it has quite ended: {from_last * after} of the "
        f"{before * after} edges between their ops were added, more would cost time"
    ]


def test_one_op_after_the_other():
    """Forward first, then the tasks as scheduled, each update when its dW is done."""
    graph = network()
    tasks = task_ops(graph)

    def order(text):
        return " ".join(execution_order(list(schedule(text).tasks), graph, tasks))

    head = "x y one noise axis"
    assert order(ORDER) == f"{head} dy shape dx1 b2 w2 u2 dx0 w1 u1 w0 n0 u0"
    late = order("dO:2 dO:1 dO:0 dW:0 dW:1 dW:2")
    assert late == f"{head} dy shape dx1 dx0 w0 n0 u0 w1 u1 b2 w2 u2"


def test_updates_of_a_layer_without_a_dw_come_last():
    ops = [op("dy", DO), op("u1", U, layer=1), op("w0", DW, "dy", layer=0), op("u0", U, "w0", layer=0)]
    graph = graph_of(ops, [["w0"], []], {0: ["u0"], 1: ["u1"]})
    order = execution_order([Task("dO", 0), Task("dW", 0)], graph, task_ops(graph))
    assert order == ["dy", "w0", "u0", "u1"]


def test_an_update_comes_after_all_of_its_dw():
    """Also where it reads the first op alone; the next task's ops come behind it."""
    ops = [op("dy", DO), op("w1", DW, "dy", layer=1), op("n1", DW, "w1", layer=1), op("u1", U, "w1", layer=1)]
    graph = graph_of([*ops, op("w0", DW, "dy", layer=0)], [["w0"], ["w1", "n1"]], {1: ["u1"]})
    order = execution_order([Task("dO", 1), Task("dW", 1), Task("dW", 0)], graph, task_ops(graph))
    assert order == ["dy", "w1", "n1", "u1", "w0"]


def test_a_producer_that_stands_later_closes_a_loop():
    ops = [op("enter", F, "next"), op("twice", F, "enter", "enter", "^enter"), op("next", F, "twice", "gone")]
    assert waits(dependencies(graph_of([op("alone", F, "alone")], []))) == {"alone": []}
    assert waits(dependencies(graph_of(ops, []))) == {"enter": [], "twice": ["enter"], "next": ["twice"]}
