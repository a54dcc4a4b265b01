"""Some steps in one graph, each put in a schedule's order; which layer is which; what goes when."""

from __future__ import annotations

import functools
import itertools
import time

import keras
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE, steps_of
from grappler_passes.compat import runtime
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.compat import func_graphs
from tf_ooo.errors import ScheduleError
from tf_ooo.modes.data_parallel.ordering import (
    communication_edges,
    layer_keys,
    numbered_as,
    order_steps,
    request_to_look,
    request_to_order,
    request_to_take,
)
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.rewriting.lowering import only_tasks, task_ops

STEPS, LAST = 3, "step_2"


def schedule(tasks, communications="", **more):
    lanes = {(0, 0): [Task.parse(word) for word in tasks.split()]}
    if communications:
        lanes[0, 1] = [Task.parse(word) for word in communications.split()]
    return Schedule("data_parallel", "byhand", lanes, workers=2, **more)


def texts(made):
    return {lane: " ".join(map(str, tasks)) for lane, tasks in made.lanes.items()}


def averaged(gradient, key):
    return tf.raw_ops.CollectiveReduceV2(
        input=gradient, group_size=2, group_key=1, instance_key=key, ordering_token=[], merge_op="Add",
        final_op="Id",
    )  # fmt: skip


@pytest.fixture(scope="module")
def some_steps():
    """A network of two layers, trained for three steps; nothing of it runs."""
    weights = [tf.Variable(tf.ones((3, 4)), name="first"), tf.Variable(tf.ones((4, 2)), name="second")]

    @tf.function
    def steps(x):
        for number in range(STEPS):
            with tf.name_scope(f"tf_ooo_step_{number}/"):
                with tf.GradientTape() as tape:
                    hidden = tf.tanh(x[number] @ weights[0])
                    loss = tf.reduce_sum(tf.tanh(hidden @ weights[1]) ** 2)
                gradients = tape.gradient(loss, weights)
                for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                    weight.assign_sub(0.1 * averaged(gradient, 10 * number + place))
        return loss

    graph_def = runtime.graph_def_of(steps.get_concrete_function(tf.TensorSpec((STEPS, 5, 3))))[0]
    for node in graph_def.node:  # TensorFlow has collectives wait for each other
        if node.op.startswith("Collective"):
            data = [text for text in node.input if text[0] != "^"]
            del node.input[:]
            node.input.extend(data)
    return graph_def


# Layer 0 has no dO of its own: nothing reads it but its dW.
LATE_FIRST = "dO:1 dW:1 dO:0 dW:0", "comm:1 comm:0"
EARLY_FIRST = "dO:1 dO:0 dW:0 dW:1", "comm:0 comm:1"


def added(before, after):
    """The control inputs that nodes gained, ``(from, to)``."""
    pairs = []
    for old, new in zip(before.node, after.node, strict=True):
        assert old.name == new.name
        assert list(new.input[: len(old.input)]) == list(old.input)
        pairs += [(text.removeprefix("^"), new.name) for text in new.input[len(old.input) :]]
    return pairs


def weight_gradients(result, graph_def):
    """``{(step, layer): dW ops}``: the names in the last step, with each step's scope."""
    layers = result.training_graph.layers
    names = {layer.index: layer.weight_grad_ops for layer in layers}
    there = {node.name for node in graph_def.node}
    return {
        (step, layer): [n for name in ops if (n := name.replace(LAST, f"step_{step}")) in there]
        for step in range(STEPS)
        for layer, ops in names.items()
    }


def runs_before(index, first, then):
    return all(index.implied(a, b) for a in first for b in then)


def test_each_step_is_put_in_the_order(some_steps):
    before = some_steps.SerializeToString(deterministic=True)
    stock = GraphIndex(some_steps)
    for plan, first in ((EARLY_FIRST, 0), (LATE_FIRST, 1)):
        asked, started = [], time.perf_counter()
        result = order_steps(some_steps, lambda graph, p=plan, a=asked: a.append(graph) or schedule(*p))
        assert some_steps.SerializeToString(deterministic=True) == before
        assert len(asked) == 1
        assert not any(other in name for name in asked[0].ops for other in ("step_1", LAST))
        index, dW = GraphIndex(result.graph_def), weight_gradients(result, some_steps)
        assert all(dW.values())
        for step in range(STEPS):
            assert runs_before(index, dW[step, first], dW[step, 1 - first])
            assert not runs_before(stock, dW[step, 0], dW[step, 1])
        # Edges within a step only: steps overlap.
        edges = added(some_steps, result.graph_def)
        number = dict(zip(stock.names, steps_of(some_steps), strict=True))
        assert edges
        assert all(number[a] == number[b] is not None for a, b in edges)
        assert {number[b] for _, b in edges} == {0, 1, 2}
        assert result.added_edges == len(edges)
        assert 0 < result.plan_seconds < time.perf_counter() - started
        assert texts(result.schedule) == {(0, 0): plan[0].replace("dO:0 ", ""), (0, 1): plan[1]}


@pytest.mark.parametrize(("plan", "of_a_step"), [(EARLY_FIRST, 1), (LATE_FIRST, 3)])
def test_what_moved_are_the_ops_of_tasks_that_wait(some_steps, plan, of_a_step):
    """All ops of a task of which one waits, in each step: the second layer's dW is one, the first's three."""
    result = order_steps(some_steps, lambda graph: schedule(*plan))
    waiting = {after for _, after in added(some_steps, result.graph_def)}
    tasks = task_ops(result.training_graph).ops.values()
    moved = [names for names in tasks if waiting & set(names)]
    assert 0 < len(moved) < len(tasks)
    assert sum(map(len, moved)) == of_a_step
    assert result.moved_ops == STEPS * of_a_step
    assert result.notes == ()
    assert result.mixed == {}
    assert result.tasks == {}


def test_graphs_of_each_step_have_a_folder(some_steps, tmp_path):
    order_steps(some_steps, lambda graph: schedule(*EARLY_FIRST), dump_dir=tmp_path)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == [f"step_{step:02d}" for step in range(STEPS)]


def test_tasks_of_all_steps(some_steps):
    """Each step has tasks of ops that compute, without communication, and no op is counted for two steps."""
    result = order_steps(some_steps, lambda graph: schedule(*EARLY_FIRST), with_tasks=True)
    number = dict(zip(GraphIndex(some_steps).names, steps_of(some_steps), strict=True))
    assert {task.kind for task in result.tasks.values()} == {"F", "dO", "dW", "U"}
    assert all(number[name] == task.microbatch for name, task in result.tasks.items())
    assert {task.microbatch for task in result.tasks.values()} == set(range(STEPS))


def test_communication_in_the_order_of_the_schedule(some_steps):
    """First the layer whose gradient is made last: the other is handed over when that one is ready."""
    backwards = "dO:1 dW:1 dO:0 dW:0", "comm:0 comm:1"
    result = order_steps(some_steps, lambda graph: schedule(*backwards))
    index, graph = GraphIndex(result.graph_def), result.training_graph
    stock = GraphIndex(some_steps)
    (last_made,), (other,) = (graph.layers[i].communication_ops for i in (0, 1))
    (gradient,) = {
        name for name, _ in graph.ops[last_made].inputs if graph.ops[name].kind is OpKind.WEIGHT_GRAD
    }
    for step in range(STEPS):
        names = [name.replace(LAST, f"step_{step}") for name in (gradient, other)]
        assert index.implied(*names)
        assert not stock.implied(*names)


def test_what_is_planned_is_written_into_each_step(some_steps):
    result = order_steps(some_steps, lambda graph: schedule(*EARLY_FIRST))
    marks = {
        node.name: {key: value for key, value in node.attr.items() if key.startswith("_ooo_")}
        for node in result.graph_def.node
    }
    number = dict(zip((n.name for n in some_steps.node), steps_of(some_steps), strict=True))
    dW = weight_gradients(result, some_steps)
    for step in range(STEPS):
        for layer in range(2):
            for name in dW[step, layer]:
                assert marks[name]["_ooo_kind"].s == b"dW"
                assert marks[name]["_ooo_layer"].i == layer
                # dO:1 before dW:0 and dW:1.
                assert marks[name]["_ooo_priority"].i == 1 + layer
    assert not any(marks[name] for name, step in number.items() if step is None)


def test_the_layers_that_were_planned_may_have_other_numbers(some_steps):
    """Rank 0's layer 0 is the second here: what it plans first comes last."""
    keys = layer_keys(some_steps, order_steps(some_steps, lambda graph: schedule(*LATE_FIRST)).training_graph)
    assert keys == [(0,), (1,)]
    plan = "dO:0 dW:0 dO:1 dW:1", "comm:1 comm:0"
    result = order_steps(some_steps, lambda graph: schedule(*plan), planned_for=[[1], [0]])
    assert texts(result.schedule) == {(0, 0): "dO:1 dW:1 dW:0", (0, 1): "comm:0 comm:1"}
    with pytest.raises(ScheduleError, match="^rank 0.s plan and this graph do not have the same layers"):
        order_steps(some_steps, lambda graph: schedule(*plan), planned_for=[[0, 1]])
    with pytest.raises(ScheduleError, match="^the schedule has 3 layers, the graph 2"):
        order_steps(some_steps, lambda graph: schedule("dO:2 dO:1 dO:0 dW:0 dW:1 dW:2"))


def some_function(*used):
    """Each step multiplies its input by these weights, in this order."""
    weights = [tf.Variable(tf.ones((3, 3))), tf.Variable(tf.ones((3, 3)))]

    @tf.function
    def steps(x):
        for number, chosen in enumerate(used):
            own = [weights[i] for i in chosen]
            with func_graphs.numbered_step(number, STEP_ATTR, STEP_SCOPE):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(functools.reduce(lambda y, weight: tf.tanh(y @ weight), own, x) ** 2)
                for weight, gradient in zip(own, tape.gradient(loss, own), strict=True):
                    weight.assign_sub(0.1 * gradient)
        return loss

    return steps


def two_steps(*used):
    return runtime.graph_def_of(some_function(*used).get_concrete_function(tf.TensorSpec((5, 3))))[0]


@pytest.mark.parametrize(
    ("request_to", "replaced"),
    [
        (request_to_look, [True, True, False]),  # the largest, and the latest of these
        (lambda model: request_to_order(model, lambda graph: schedule(*EARLY_FIRST)), [True, True, False]),
        (request_to_take, [True, True, True]),
    ],
)
def test_which_of_several_graphs_is_kept(request_to, replaced):
    request, kept = request_to(keras.Sequential()), []
    for steps in (2, 3, 3, 2):
        with request.tracing():
            some_function(*[(0, 1)] * steps)(tf.ones((5, 3)))
        kept.append(request.result)
    assert [one is not other for one, other in itertools.pairwise(kept)] == replaced
    with request.tracing():
        tf.function(lambda x: tf.tanh(x) + 1)(tf.ones(3))
    assert request.count == 4
    request.close()


def test_the_plan_counts_the_layers_of_the_first_step():
    result = order_steps(two_steps((0, 1), (1, 0)), lambda graph: schedule(*LATE_FIRST))
    assert texts(result.schedule) == {(0, 0): "dW:0 dO:1 dW:1", (0, 1): "comm:0 comm:1"}


def test_steps_of_different_layers_are_refused():
    with pytest.raises(ScheduleError, match="^the steps of the unrolled graph do not have the same layers"):
        order_steps(two_steps((0, 1), (0,)), lambda graph: schedule(*LATE_FIRST))


def test_layers_by_the_places_of_their_variables():
    """Places are those of the arguments, whatever the variables are called and in which order they are."""
    graph_def = graph_pb2.GraphDef()
    for name, index in (("hc", 5), ("ha", 7), ("hb", 1), ("hd", 3)):
        graph_def.node.add(name=name, op="_Arg").attr["index"].i = index
    graph_def.node.add(name="hx", op="_Retval").attr["index"].i = 9
    graph_def.node.add(name="hy", op="NoOp").attr["index"].i = 8
    variables = tuple(Variable(name, f"h{name}") for name in "abcdxy")
    layers = (Layer(0, ("a", "b")), Layer(1, ("d",)), Layer(2, ("c",)), Layer(3, ("x",)))
    # x and y 0 (no arguments), b 1, d 3, c 5, a 7.
    assert layer_keys(graph_def, TrainingGraph({}, layers, variables)) == [(2, 5), (3,), (4,), (0,)]


def test_layers_with_other_numbers():
    plan = schedule(
        "dO:2 dO:1 dW:2 dO:0 dW:0 dW:1", "comm:2 comm:0 comm:0.1 comm:1", parts={("comm", 0): (0.25, 0.75)}
    )
    assert numbered_as(plan, [0, 1, 2]) is plan
    other = numbered_as(plan, [2, 0, 1])
    assert texts(other) == {(0, 0): "dO:1 dO:0 dW:1 dO:2 dW:2 dW:0", (0, 1): "comm:1 comm:2 comm:2.1 comm:0"}
    assert dict(other.parts) == {("comm", 2): (0.25, 0.75)}
    for numbers in ([0, 1], [0, 1, 2, 3]):
        with pytest.raises(ScheduleError, match=f"the schedule has 3 layers, the graph {len(numbers)}"):
            numbered_as(plan, numbers)
    with pytest.raises(ScheduleError, match="the schedule has 1 layers, the graph 1"):
        numbered_as(schedule("dW:1"), [0])


def test_tasks_that_the_graph_does_not_have_are_left_out():
    plan = schedule("F:0 dO:1 dO:0 dW:0 dW:1 U:0", "comm:1 comm:0")
    kept = only_tasks(plan, [Task("dO", 1), Task("dW", 0), Task("dW", 7)])
    assert texts(kept) == {(0, 0): "F:0 dO:1 dW:0 U:0", (0, 1): "comm:1 comm:0"}


def network(sizes, gathered=()):
    """Each layer's gradient is packed, sent and unpacked; ``gathered`` layers have two such chains."""
    ops, layers, variables = {}, [], []
    for layer, size in enumerate(sizes):
        names = []
        for chain in range(2 if layer in gathered else 1):
            of = f"{layer}{'ab'[chain]}"
            rows = [
                (f"g{of}", "MatMul", OpKind.WEIGHT_GRAD, ()),
                (f"c{of}", "Const", OpKind.COMMUNICATION, ()),
                (f"pack{of}", "ConcatV2", OpKind.COMMUNICATION, (f"g{of}", f"c{of}")),
                (f"send{of}", "CollectiveReduceV2", OpKind.COMMUNICATION, (f"pack{of}",)),
                (f"split{of}", "Split", OpKind.COMMUNICATION, (f"send{of}",)),
            ]
            for name, kind_of_op, kind, inputs in rows:
                data = tuple((source, 0) for source in inputs)
                ops[name] = Op(name, kind_of_op, kind, layer=layer, inputs=data)
            names += [name for name, *_ in rows[1:]]
        layers.append(Layer(layer, (f"v{layer}",), communication_ops=tuple(names)))
        variables.append(Variable(f"v{layer}", f"h{layer}", (size,)))
    return TrainingGraph(ops, tuple(layers), tuple(variables))


def test_a_layer_is_handed_over_from_its_first_op_to_its_last():
    """Before layer 0 goes, layer 2 has to be through; layer 2 waits for the gradient of layer 0."""
    graph = network([1, 1, 100])
    edges = communication_edges(schedule("dW:2 dW:1 dW:0", "comm:2 comm:1 comm:0"), graph, 4)
    assert edges == [("split2a", "pack0a")]
    early = communication_edges(schedule("dW:2 dW:0", "comm:0 comm:2"), network([1, 1, 1]), 99)
    assert ("g0a", "pack2a") in early
    assert {after for _, after in early} == {"pack2a"}


def test_all_chains_of_a_layer_wait_and_are_waited_for():
    graph = network([1, 1, 1], gathered=(0, 2))
    edges = communication_edges(schedule("dW:2 dW:1 dW:0", "comm:2 comm:1 comm:0"), graph, 4)
    assert {e for e in edges if e[1].startswith("pack")} == {
        (f"split2{a}", f"pack0{b}") for a in "ab" for b in "ab"
    }


@pytest.mark.parametrize(
    ("sizes", "flight_bytes", "expected"),
    [
        # 4 bytes an element.  Two are under way whatever their size.
        ([1, 1, 1, 1, 1], 4, [(4, 2), (3, 1), (2, 0)]),
        ([1, 1, 1, 1, 1], 5, [(4, 1), (3, 0)]),
        ([1, 1, 1, 1, 1], 8, [(4, 1), (3, 0)]),
        ([1, 1, 1, 1, 1], 9, [(4, 0)]),
        ([1, 1, 1, 1, 1], 17, []),
        ([1, 2, 3, 4, 5], 20, [(4, 1), (3, 0)]),
        ([1, 2, 3, 4, 5], 21, [(4, 1), (4, 0)]),
        ([9, 1, 1, 1, 1], 0, [(4, 2), (3, 1), (2, 0)]),
    ],
)
def test_bytes_under_way(sizes, flight_bytes, expected):
    layers = range(len(sizes))[::-1]
    lanes = " ".join(f"dW:{i}" for i in layers), " ".join(f"comm:{i}" for i in layers)
    edges = communication_edges(schedule(*lanes), network(sizes), flight_bytes)
    assert [(int(a[5]), int(b[4])) for a, b in edges if b.startswith("pack")] == expected


def test_two_mebibytes_are_under_way_where_nothing_was_measured():
    lanes = "dW:2 dW:1 dW:0", "comm:2 comm:1 comm:0"
    assert communication_edges(schedule(*lanes), network([1, 2**19, 1])) == [("split2a", "pack0a")]
    assert communication_edges(schedule(*lanes), network([1, 2**19 - 1, 1])) == []


def test_slices_that_the_graph_does_not_have_are_no_slices():
    """Layer 1 counts whole: 16 bytes are under way, not 4."""
    lanes = "dW:2 dW:1 dW:0", "comm:2 comm:1 comm:1.1 comm:0"
    plan = schedule(*lanes, parts={("comm", 1): (0.25, 0.75)})
    assert communication_edges(plan, network([1, 4, 1]), 10) == [("split2a", "pack0a")]


def test_each_of_two_slices_counts_its_share():
    """16 bytes in 4 and 12: the first may fly with layer 2, and has to be through before layer 0."""
    lanes = "dW:2 dW:1 dW:0", "comm:2 comm:1 comm:1.1 comm:0"
    plan = schedule(*lanes, parts={("comm", 1): (0.25, 0.75)})
    second = dict.fromkeys(("pack1b", "send1b", "split1b"), 1)
    graph = network([1, 4, 1], gathered=(1,))
    assert communication_edges(plan, graph, 5, second) == [("split1a", "pack0a")]


def test_a_layer_whose_gradient_nobody_orders_is_ready_at_once():
    """Layer 1 has no dW in the schedule: sent behind layer 0, it waits until that one is made."""
    edges = communication_edges(schedule("dW:2 dW:0", "comm:0 comm:1"), network([1, 1, 1]))
    assert ("g0a", "pack1a") in edges
    assert communication_edges(schedule("dW:0 dW:2", "comm:1 comm:0"), network([1, 1, 1])) == []
    assert communication_edges(schedule("dW:2", "comm:0 comm:1"), network([1, 1, 1])) == []
    # As it is made first of all, the first of the lane does not make the second wait.
    assert communication_edges(schedule("dW:2 dW:0", "comm:2 comm:0"), network([1, 1, 1])) == []
