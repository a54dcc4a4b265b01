"""Plans of data parallel: steps together, slices, links, bytes sent; not the order of communication."""

from __future__ import annotations

import dataclasses

import pytest

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.modes.data_parallel.ordering import communication_edges, sent_bytes
from tf_ooo.modes.data_parallel.planning import TRIED, calibrated, link_from, make_plan, step_time_of
from tf_ooo.planning.choosing.plan import Trial
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.rewriting.plan import plan
from tf_ooo.tracing.flat import steps_together
from tf_ooo.tracing.intercepting import counts_for


@pytest.mark.parametrize(
    ("steps", "most", "expected"),
    [(8, 8, 8), (3, 8, 3), (20, 8, 5), (16, 8, 8), (100, 8, 5), (11, 8, 8), (14, 8, 7), (9, 1, 1)],
)
def test_steps_together(steps, most, expected):
    assert steps_together(steps, most) == expected


def graph_of(layers, sizes=None):
    """Each layer has two communications, a kernel's and a bias'; kernels of so many floats."""
    ops = {}
    rows = []
    variables = []
    for layer in range(layers):
        names = (f"comm{layer}k", f"comm{layer}b")
        for name in names:
            ops[f"grad{name[4:]}"] = Op(f"grad{name[4:]}", "MatMul", OpKind.WEIGHT_GRAD, layer=layer)
            inputs = ((f"grad{name[4:]}", 0),)
            ops[name] = Op(name, "HorovodAllreduce", OpKind.COMMUNICATION, layer=layer, inputs=inputs)
        rows.append(Layer(layer, (f"w{layer}",), communication_ops=names))
        variables.append(Variable(f"w{layer}", f"handle{layer}", ((sizes or [1] * layers)[layer],)))
    return TrainingGraph(ops, tuple(rows), tuple(variables))


def test_a_small_gradient_goes_between_the_slices_of_a_large_one():
    graph = graph_of(2, [4, 100])
    lanes = {
        (0, 0): TaskList([Task("dW", 1), Task("dW", 0)]),
        (0, 1): TaskList(
            [Task("comm", 1), Task("comm", 0), Task("comm", 1, part=1), Task("comm", 1, part=2)]
        ),
    }
    shares = {("comm", 1): (0.5, 0.25, 0.25)}
    schedule = Schedule("data_parallel", "search", lanes, workers=2, parts=shares)
    assert communication_edges(schedule, graph, flight_bytes=1) == []  # the graph has no slices
    sliced = dataclasses.replace(
        graph.layers[1], communication_ops=("comm1b", "comm1k0", "comm1k1", "comm1k2")
    )
    ops = {name: op for name, op in graph.ops.items() if name != "comm1k"}
    ops |= {f"comm1k{n}": dataclasses.replace(graph.ops["comm1k"], name=f"comm1k{n}") for n in range(3)}
    graph = dataclasses.replace(graph, ops=ops, layers=(graph.layers[0], sliced))
    parts = {f"comm1k{n}": n for n in range(3)}
    # 400 bytes: 200, then 16 of layer 0 (made later), then 100, 100.
    assert communication_edges(schedule, graph, 1, parts) == [
        ("comm1b", "comm1k1"),
        ("comm1k0", "comm1k1"),
        ("grad0k", "comm1k1"),
        ("grad0b", "comm1k1"),
        ("comm0k", "comm1k2"),
        ("comm0b", "comm1k2"),
    ]
    last = [
        before for before, after in communication_edges(schedule, graph, 110, parts) if after == "comm1k2"
    ]
    assert last == ["comm1b", "comm1k0"]  # 116 bytes may be under way


def test_slices_are_of_what_is_larger_than_a_part_of_its_layer():
    graph = graph_of(2)
    lanes = {(0, 1): TaskList([Task("comm", 1), Task("comm", 0)])}
    shares = {("comm", 1): (0.25,) * 4, ("dO", 0): (0.5, 0.5)}
    schedule = Schedule("data_parallel", "search", lanes, workers=2, parts=shares)
    sizes = {"comm0k": 9, "comm1k": 90, "comm1b": 10}
    assert counts_for(schedule, graph, sizes) == {"comm1k": 4}


MIB = 1024**2


def test_the_smallest_messages_that_use_the_link_well():
    link = link_from({MIB: 1.0, 2 * MIB: 1.2, 4 * MIB: 2.2}, workers=2)
    # 1, 1.67, 1.82 MiB a second.
    assert link.flight_bytes == 2 * MIB
    assert link.link == Link(0.0, 4 * MIB / 2.2)


def test_a_burst_that_a_network_lets_through_is_no_bandwidth():
    link = link_from({MIB: 0.4, 2 * MIB: 1.2, 4 * MIB: 2.2}, workers=2)
    assert link.flight_bytes == MIB
    assert link.link == Link(0.0, 4 * MIB / 2.2)


def test_small_messages_that_follow_one_another_while_nothing_computes_are_not_enough():
    assert link_from({MIB // 16: 0.1, MIB: 1.6}, workers=2).flight_bytes == MIB


def layer_that_sends(*ops):
    """A layer of 1000 floats; each of the ops that communicate is (type, bytes of what it is given)."""
    graph = graph_of(1, [1000])
    given = {
        f"given{n}": Op(f"given{n}", "Mul", OpKind.WEIGHT_GRAD, output_bytes=size)
        for n, (_, size) in enumerate(ops)
    }
    sends = {
        f"sends{n}": Op(f"sends{n}", kind, OpKind.COMMUNICATION, inputs=((f"given{n}", 0),))
        for n, (kind, _) in enumerate(ops)
    }
    layer = dataclasses.replace(graph.layers[0], communication_ops=tuple(sends))
    return dataclasses.replace(graph, ops=graph.ops | given | sends, layers=(layer,))


@pytest.mark.parametrize(
    ("ops", "workers", "sent"),
    [
        ([("HorovodAllreduce", 4000)], 2, 4000),
        ([("HorovodAllreduce", 2000)], 8, 2000),  # as float16
        ([("CollectiveReduceV2", 3000), ("Const", 9), ("CollectiveReduceV2", 1000)], 3, 4000),
        ([("HorovodAllgather", 600), ("HorovodAllgather", 40)], 2, 640),
        ([("CollectiveGatherV2", 600)], 4, 1200),
        ([("HorovodAllgather", None)], 2, 4000),
        ([("HorovodAlltoall", 500)], 2, 4000),
    ],
)
def test_what_a_layer_sends(ops, workers, sent):
    assert sent_bytes(layer_that_sends(*ops), workers) == [sent]


LAYERS = [LayerCosts(1.0, 1.0, 1.0, 0.1, weight_bytes=w) for w in (4, 3, 2, 1, 4)]


def step_seconds(schedule, layers, link, steps):
    return Trial(schedule, Problem(tuple(layers), link=link), step_time_of(steps)).step_s


def test_the_plan_is_never_predicted_slower_than_the_stock_order():
    for bytes_per_s in (0.5, 1.0, 4.0, 100.0):
        link = Link(0.0, bytes_per_s)
        gain = make_plan(LAYERS, link, 2, "auto", steps=8)
        assert gain.plan.step_s <= gain.stock_s
        assert gain.plan.step_s == pytest.approx(step_seconds(gain.plan.schedule, LAYERS, link, 8))
        assert gain.plan.schedule.predicted_step_s == gain.plan.step_s


def test_where_no_order_gains_the_stock_order_is_compared_with_gradients_handed_over_in_turn():
    layers = [dataclasses.replace(layer, update_s=0.0) for layer in LAYERS]
    fast, slow = (make_plan(layers, Link(0.0, speed), 2, "auto", steps=8) for speed in (1e6, 1.0))
    assert fast.plan.step_s > fast.stock_s * (1 - TRIED)
    orders = [[str(task) for task in lane] for lane in fast.plan.schedule.lanes.values()]
    stock = plan(layers=LAYERS, schedule="in_order", mode="data_parallel", devices=2).lanes.values()
    assert orders[0] == [str(task) for task in next(iter(stock))]
    assert orders[1] == [f"comm:{layer}" for layer in reversed(range(len(LAYERS)))]
    assert slow.plan.step_s <= slow.stock_s * (1 - TRIED)


@pytest.mark.parametrize(
    ("step_s", "is_as_measured"), [(7.0, False), (20.0, True), (50.0, True), (200.0, False)]
)
def test_calibrated_costs_predict_the_step_that_was_measured(step_s, is_as_measured):
    """Computing changes; the link, which was measured by itself, only where that cannot be all."""
    link = Link(0.1, 1.0)
    layers, between = calibrated(LAYERS, link, 2, step_s)
    stock = plan(layers=list(layers), schedule="in_order", mode="data_parallel", devices=2, link=between)
    assert step_seconds(stock, layers, between, 1) == pytest.approx(step_s, rel=1e-3)
    assert (between == link) == is_as_measured
    assert layers[0].weight_bytes == LAYERS[0].weight_bytes
    ratios = {round(layer.forward_s / was.forward_s, 9) for layer, was in zip(layers, LAYERS, strict=True)}
    assert len(ratios) == 1


def test_the_barrier_after_an_execution_counts():
    link = Link(0.0, 1.0)
    schedule = plan(
        layers=LAYERS, schedule="reverse_first_k", mode="data_parallel", devices=2, link=link, k=3
    )
    alone, many = (step_seconds(schedule, LAYERS, link, steps) for steps in (1, 16))
    assert many < alone
    assert many == pytest.approx((alone + 15 * schedule.predicted_step_s) / 16, rel=0.02)
