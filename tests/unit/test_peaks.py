"""Peaks that a memory limit is held against, and the order in which TensorFlow would run a step."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from grappler_passes.compat import runtime
from grappler_passes.graph.sizes import KnownShapes
from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph
from tf_ooo.errors import GraphError, MemoryLimitError
from tf_ooo.modes.single_device.options import SingleDevice
from tf_ooo.rewriting import one_device
from tf_ooo.rewriting.result import Orders


def graph(*rows):
    """``"name size device: input input"``, in the order of the graph."""
    ops = {}
    for row in rows:
        head, _, inputs = row.partition(":")
        name, size, device = head.split()
        read = tuple((source, 0) for source in inputs.split())
        output_bytes = None if size == "?" else int(size)
        ops[name] = Op(name, "MatMul", OpKind.FORWARD, inputs=read, device=device, output_bytes=output_bytes)
    return TrainingGraph(ops, (), ())


# a -> b -> d, a -> c -> d, e by itself.
DIAMOND = graph("a 10 A:", "b 1 A: a", "c 2 A: a", "e 4 B:", "d 8 A: b c")


def test_ready_first_runs_first():
    """``a`` and ``e`` wait for nothing; what ``a`` makes ready comes behind ``e``."""
    assert one_device.stock_order(DIAMOND) == ["a", "e", "b", "c", "d"]


def test_the_order_in_which_inputs_come_does_not_matter():
    """An op runs when the last of its producers has run, however often it reads one."""
    deep = graph("a 1 A:", "b 1 A: a", "c 1 A: b", "d 1 A: a c c", "e 1 A: a")
    assert one_device.stock_order(deep) == ["a", "b", "e", "c", "d"]


def test_the_highest_peak_is_that_of_the_fullest_device():
    """A: a 10, b 11, c 13, then a goes, d 11.  B: e 4."""
    assert one_device.highest_peak(DIAMOND, one_device.stock_order(DIAMOND)) == 13
    assert one_device.highest_peak(graph("a 3 A:", "b 5 B:"), ["a", "b"]) == 5
    assert one_device.highest_peak(DIAMOND, []) == one_device.highest_peak(graph("a 0 A:"), ["a"]) == 0


def test_auto_is_the_default_policy_and_others_are_taken_by_name():
    assert one_device.plan_graph(DIAMOND, "auto").policy == one_device.DEFAULT_POLICY
    for name in one_device.BACKWARD_ORDERS:
        assert one_device.plan_graph(DIAMOND, name).policy == name


def test_sizes_must_be_known():
    one_device.require_sizes(DIAMOND, 5)
    with pytest.raises(MemoryLimitError, match="b") as raised:
        one_device.require_sizes(graph("a 1 A:", "b ? A: a"), 5)
    assert raised.value.smallest_bytes is None


def test_what_was_separated_is_no_part_of_the_stock_peak():
    """The order is that of the graph as it came, with an op that is taken apart since then."""
    order = ["a", "e", "b", "of_the_graph_as_it_came", "c", "d"]
    assert one_device.stock_peak(DIAMOND, order) == 13


def make_an_argument(placeholder):
    """Make it what optimizers get in its place."""
    placeholder.op = "_Arg"
    placeholder.attr["_output_shapes"].list.shape.add().CopyFrom(placeholder.attr["shape"].shape)
    placeholder.attr["T"].type = placeholder.attr["dtype"].type
    placeholder.attr["index"].i = 0
    for name in ("shape", "dtype"):
        del placeholder.attr[name]


@pytest.fixture
def rewritten():
    """An input of open length, doubled and then added up with itself: 8 bytes, 8, 8 of each row."""
    with tf.Graph().as_default() as traced:
        x = tf.compat.v1.placeholder(tf.float32, (None, 2), name="x")
        first, second = tf.tanh(x, name="first"), tf.sin(x, name="second")
        tf.add(first, second, name="both")
    graph_def = traced.as_graph_def()
    make_an_argument(next(node for node in graph_def.node if node.name == "x"))
    reads = {"x": (), "first": ("x",), "second": ("x",), "both": ("first", "second")}
    ops = {
        name: Op(
            name, traced.get_operation_by_name(name).type, OpKind.FORWARD, inputs=tuple((s, 0) for s in read)
        )
        for name, read in reads.items()
    }
    planned = ("x", "first", "second", "both")
    stock = ("x", "second", "first", "both", "of_the_graph_as_it_came")

    def result(planned=planned):
        orders = planned and Orders(planned, stock, 0, open_sizes=True)
        return SimpleNamespace(training_graph=TrainingGraph(ops, (), ()), graph_def=graph_def, orders=orders)

    return result


def test_peaks_with_inputs_of_another_size(rewritten):
    """Three tensors of ten rows at once: the input is somebody else's."""
    known = KnownShapes(batch_size=10)
    assert one_device.check_memory(rewritten(), known, 3 * 80) == 3 * 80
    with pytest.raises(MemoryLimitError) as raised:
        one_device.check_memory(rewritten(), known, 3 * 80 - 1)
    assert raised.value.smallest_bytes == 3 * 80
    assert one_device.check_memory(rewritten(), KnownShapes(batch_size=5), 3 * 80 - 1) == 3 * 40


def test_the_stock_peak_is_told_where_only_it_is_above_the_limit(rewritten):
    """The planned order, cut short here, has two tensors at once."""
    result = rewritten(planned=("x", "first", "second"))
    assert one_device.check_memory(result, KnownShapes(batch_size=10), 2 * 80) == 3 * 80


def test_peaks_of_sizes_that_stay_open(rewritten):
    with pytest.raises(MemoryLimitError, match="first"):
        one_device.check_memory(rewritten(), KnownShapes(), 10**9)


def test_without_a_limit_there_is_nothing_to_check(rewritten):
    assert one_device.check_memory(rewritten(planned=None), KnownShapes(), 1) == 0


@pytest.fixture(scope="module")
def step():
    """Three layers of which the second is wide, on batches of any size: the policies have other peaks."""
    kernels = [tf.Variable(tf.ones(shape)) for shape in ((4, 4), (4, 64), (64, 4))]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = tf.tanh(x @ kernel)
            loss = tf.reduce_sum(x**2)
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(0.1 * gradient)
        return loss

    graph_def, *_ = runtime.graph_def_of(step.get_concrete_function(tf.TensorSpec((None, 4))))
    make_an_argument(next(node for node in graph_def.node if node.name == "x"))
    return graph_def


def rewrite(step, **options):
    return one_device.rewrite_graph(step, SingleDevice(**options))


def test_under_a_limit_the_lowest_peak_is_taken_unless_the_named_policy_fits(step):
    """Each policy at its own peak, and all of them a byte below the lowest and the highest."""
    peaks = {}
    for name in one_device.BACKWARD_ORDERS:
        result = rewrite(step, schedule=name, batch_size=8, memory_limit_bytes=10**9)
        peaks[name] = result.schedule.predicted_peak_bytes
        graph = result.training_graph
        at_its_peak = one_device.plan_graph(graph, name, peaks[name])
        assert (at_its_peak.policy, at_its_peak.predicted_peak_bytes) == (name, peaks[name])
    lowest = min(peaks.values())
    assert lowest < max(peaks.values())
    for name in ("auto", *peaks):
        taken = one_device.plan_graph(graph, name, max(lowest, peaks.get(name, lowest + 1) - 1))
        assert taken.predicted_peak_bytes == lowest
        with pytest.raises(MemoryLimitError) as raised:
            one_device.plan_graph(graph, name, lowest - 1)
        assert raised.value.smallest_bytes == lowest


def test_what_a_rewrite_says_of_itself(step):
    """With a limit the orders and the peak of the stock one, whose sizes the graph had left open."""
    started = time.perf_counter()
    result = rewrite(step, schedule="fast_forward")
    assert 0 < result.plan_seconds < time.perf_counter() - started
    assert (result.orders, result.schedule.policy) == (None, "fast_forward")
    had = {node.name: len(node.input) for node in step.node}
    assert result.added_edges == sum(len(n.input) - had[n.name] for n in result.graph_def.node) > 0
    limited = rewrite(step, batch_size=8, memory_limit_bytes=10**9)
    graph, orders = limited.training_graph, limited.orders
    assert orders.open_sizes
    assert orders.stock == tuple(one_device.stock_order(one_device.classify(step)))
    assert sorted(orders.planned) == sorted(graph.ops)
    assert orders.stock_peak_bytes == one_device.highest_peak(graph, orders.stock)
    assert limited.schedule.predicted_peak_bytes == one_device.highest_peak(graph, orders.planned)
    assert one_device.peak_with(limited, KnownShapes(8)) == limited.schedule.predicted_peak_bytes
    assert one_device.peak_with(result, KnownShapes()) is None
    assert result.schedule.predicted_peak_bytes < one_device.peak_with(result, KnownShapes(8))


def test_what_is_no_graph_is_refused():
    with pytest.raises(GraphError, match="expected a GraphDef or a ConcreteFunction, got a int"):
        one_device.classify(3)
    with pytest.raises(GraphError, match="got a int; make one with tf_ooo.classify"):
        one_device.plan_graph(3)


def test_replicas_do_not_wait_for_each_other():
    """A lane for each device, in the order of their names; one without tasks if there are none."""
    kinds = {"dy": OpKind.OUTPUT_GRAD, "w": OpKind.WEIGHT_GRAD, "v": OpKind.WEIGHT_GRAD}
    reads = {"dy": (), "w": (("dy", 0),), "v": (("dy", 0),)}
    devices = {"dy": "B", "w": "A", "v": "B"}
    ops = {n: Op(n, "MatMul", kinds[n], inputs=reads[n], device=devices[n], output_bytes=1) for n in kinds}
    layers = (Layer(0, ("w",), weight_grad_ops=("w",)), Layer(1, ("v",), weight_grad_ops=("v",)))
    lanes = one_device.plan_graph(TrainingGraph(ops, layers, ())).lanes
    assert [(lane, {str(task) for task in tasks}) for lane, tasks in lanes.items()] == [
        ((0, 0), {"dW:0"}),
        ((1, 0), {"dO:1", "dW:1"}),
    ]
    assert {lane: list(tasks) for lane, tasks in one_device.plan_graph(DIAMOND).lanes.items()} == {(0, 0): []}
