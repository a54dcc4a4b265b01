"""The output layer uses an embedding's weights: their gradients are sent, or both are on one device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import tf_ooo
from tf_ooo import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, ScheduleError
from tf_ooo.planning.building.stage_search import StageSearch
from tf_ooo.planning.building.stages import merged
from tf_ooo.planning.choosing.figures import side_by_side
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.task import Task

TABLE_BYTES = 4e6
LINK = Link(1e-3, 1e9)
BLOCKS = [LayerCosts(1e-3, 1e-3 * (1 + i % 2), 5e-4 * (1 + i % 3), 2e-4, 1e5, 5e4, 1e4) for i in range(9)]
EMBEDDING = LayerCosts(1e-5, 0.0, 1e-5, 1e-3, 1e5, TABLE_BYTES, 1e4)
HEAD = LayerCosts(2e-3, 2e-3, 2e-3, 0.0, 1e5, 0, 0, tied=((0, TABLE_BYTES),))
LAYERS = [EMBEDDING, *BLOCKS, HEAD]
PLAIN = [*LAYERS[:-1], replace(HEAD, tied=())]
SHAPE = {"mode": "pipeline", "devices": 3, "microbatches": 3}


def test_the_update_waits_for_every_gradient_by_hand():
    link = Link(1e-3, 1e8)
    planned = tf_ooo.plan(layers=LAYERS, schedule="gpipe", link=link, **SHAPE)
    tasks, timeline = list(planned.tasks), tf_ooo.simulate(planned, LAYERS, link)
    ends = [timeline.end_s[0][tasks.index(Task("dW", 2, number))] for number in range(3)]
    sent = 0.0
    for end in sorted(ends):  # one after the other on the link, each there a latency later
        sent = max(sent, end) + TABLE_BYTES / link.bytes_per_s
    update = tasks.index(Task("U", 0))
    assert timeline.start_s[0][update] == pytest.approx(sent + link.latency_s)
    assert tf_ooo.simulate(planned, PLAIN, link).start_s[0][update] < sent


def test_the_output_gradient_is_not_sent_with_the_table():
    """A dW sends both apart where it is one task with dO, and one table to each owner on a device."""
    link = Link(0.0, 10.0)
    layers = [LayerCosts(1, 1, 1, output_bytes=1), LayerCosts(1, 1, 1, tied=((0, 50.0),))]
    planned = tf_ooo.plan(
        layers=layers, mode="pipeline", schedule="gpipe", devices=2, microbatches=1, link=link
    )
    assert planned.fused_backward
    timeline, tasks = tf_ooo.simulate(planned, layers, link), list(planned.tasks)
    start_s = {task: timeline.start_s[0][place] for place, task in enumerate(tasks)}
    assert start_s[Task("dO", 0)] == pytest.approx(1 + 0.1 + 3 + 0.1)
    assert start_s[Task("U", 0)] == pytest.approx(4.2 + 5)
    both = [
        LAYERS[0],
        replace(LAYERS[1], weight_bytes=1e6),
        *LAYERS[2:-1],
        replace(HEAD, tied=((0, 1e6), (1, 1e6))),
    ]
    two, one = (
        merged(tuple(rows), ((0, 0), (1, 1), (2, 10)))
        for rows in (both, [*both[:-1], replace(HEAD, tied=((0, 1e6),))])
    )
    orders = tf_ooo.plan(
        layers=list(two), schedule="zb_h1", mode="pipeline", devices=3, microbatches=2, link=LINK
    )
    sizes = [
        sorted(message.size_bytes for message in tf_ooo.simulate(orders, rows, LINK).messages)
        for rows in (two, one)
    ]
    assert [row.count(1e6) for row in sizes] == [4, 2]


@pytest.mark.parametrize("schedule", ["auto", "search", "in_order", "fast_forward", "reverse_first_k"])
@pytest.mark.parametrize("mode", ["single_device", "data_parallel"])
def test_a_device_that_has_all_weights_sends_none(mode, schedule):
    shape = {"mode": mode, "devices": 1, "schedule": schedule}
    if schedule in ("in_order", "reverse_first_k") and mode == "single_device":
        shape["schedule"] = "auto"
    planned = tf_ooo.plan(layers=LAYERS, **shape)
    assert planned.predicted_step_s == tf_ooo.plan(layers=PLAIN, **shape).predicted_step_s


def test_on_one_device_nothing_is_sent():
    planned = tf_ooo.plan(layers=LAYERS, schedule="zb_v", link=LINK, **SHAPE)
    assert planned.device_of_stage[0] == planned.device_of_stage[-1]
    both = [tf_ooo.simulate(planned, layers, LINK) for layers in (LAYERS, PLAIN)]
    assert both[0].makespan_s == both[1].makespan_s


@pytest.mark.parametrize("bytes_per_s", [2e7, 2e8])
def test_where_sending_them_takes_long_both_ends_are_on_one_device(bytes_per_s):
    link = replace(LINK, bytes_per_s=bytes_per_s)
    planned = tf_ooo.plan(layers=LAYERS, link=link, **SHAPE)
    assert planned.device_of_stage[0] == planned.device_of_stage[-1]
    blind = tf_ooo.plan(layers=PLAIN, link=link, **SHAPE)
    ours_s, blind_s = (tf_ooo.simulate(each, LAYERS, link).makespan_s for each in (planned, blind))
    assert ours_s <= blind_s
    searched = tf_ooo.plan(layers=LAYERS, link=link, schedule="zb_search", **SHAPE)
    assert searched.device_of_stage[0] == searched.device_of_stage[-1]


def test_the_same_cut_on_other_devices_sends_other_gradients():
    problem = Problem(tuple(LAYERS), 3, 3, link=Link(0.0, 1e8), mode="pipeline")
    searched, owners = (
        StageSearch(problem, 6),
        [(0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0), (0, 0, 0, 1, 1, 1, 0, 0, 0, 2, 2)],
    )
    together, apart = (searched.ordered(owner).within_s for owner in owners)
    assert together < apart == StageSearch(problem, 6).ordered(owners[1]).within_s


def test_stages_are_tied_as_their_layers_are():
    layers = [*LAYERS[:5], replace(LAYERS[5], tied=((0, 100.0), (4, 7.0))), *LAYERS[6:]]
    assert [stage.tied for stage in merged(tuple(layers), ((0, 3), (4, 7), (8, 10)))] == [
        (), ((0, 100.0),), ((0, TABLE_BYTES),),
    ]  # fmt: skip
    planned = tf_ooo.plan(layers=LAYERS, schedule="1f1b", link=LINK, **SHAPE)
    stages = merged(tuple(LAYERS), planned.stages, 3)
    _, of_both = side_by_side(replace(planned, stages=()), [stages, stages])
    assert [layer.tied for layer in of_both] == [(), (), ((0, TABLE_BYTES),), (), (), ((3, TABLE_BYTES),)]


def test_a_table_keeps_them():
    table = CostTable(tuple(LAYERS), LINK)
    assert CostTable.from_json(table.to_json()) == table
    assert '"tied"' not in CostTable(tuple(PLAIN), LINK).to_json()
    for wrong, message in (
        ([[11, 3.0]], "layer 10: is tied to layer 11, which is not before it"),
        ([[0, -3.0]], "tied must be a finite number"),
        ([[0]], r"tied: expected \[layer, bytes\]"),
        (3, "tied: expected a list of numbers"),
    ):
        content = json.loads(table.to_json())
        content["layers"][-1]["tied"] = wrong
        with pytest.raises(CostError, match=message):
            CostTable.from_json(json.dumps(content))
    for pairs in (3, (0,), ((0, 1, 2),), None):
        with pytest.raises(CostError, match=r"tied must be pairs \(layer, bytes\)"):
            replace(HEAD, tied=pairs)


def test_a_schedule_without_some_layers_is_refused_as_ever():
    planned = tf_ooo.plan(layers=LAYERS[:4], schedule="gpipe", link=LINK, **SHAPE)
    with pytest.raises(ScheduleError, match="has costs and is in no stage"):
        tf_ooo.simulate(planned, LAYERS, LINK)
