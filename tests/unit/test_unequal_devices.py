"""Devices of unequal speed on paper: cuts, orders, predictions, cost tables."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_ooo
from tf_ooo import LayerCosts, Link, OptionsError
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError
from tf_ooo.hosts.speeds import levels
from tf_ooo.modes.pipeline.mesh import make_mesh, on_best_devices
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import SCHEDULES, PlanRequest, make_plan
from tf_ooo.planning.building.pipeline import balanced
from tf_ooo.planning.choosing.plan import policy_named

LAYERS = [
    LayerCosts(1.0 + i % 3, 1.0 + i % 2, 0.5 + i % 4, 0.25, 100, 10, 5, name=f"l{i}") for i in range(12)
]


def wanted(devices, microbatches, *speeds, schedule="auto"):
    return PlanRequest(schedule, devices, microbatches, Link(speeds=speeds))


def planned(speeds, schedule="auto", microbatches=8, devices=3):
    devices = len(speeds) or devices
    return make_plan(LAYERS, units_of(12, []), wanted(devices, microbatches, *speeds, schedule=schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_policy_puts_stages_where_they_were_cut_for(schedule):
    """The cut counts on the place of each stage before the policy is asked for its order."""
    plan, chunks = planned((1.0, 0.5, 2.0), schedule), policy_named(schedule).needs.chunks
    if chunks.own:  # it says itself where they are
        assert sorted(set(plan.schedule.device_of_stage)) == [0, 1, 2]
        return
    assert plan.schedule.device_of_stage == list(chunks.devices_of(len(plan.problem.bounds), 3))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_speeds_change_nothing_but_seconds(schedule):
    alike, half = planned((1.0,) * 3, schedule), planned((0.5,) * 3, schedule)
    assert half.problem.bounds == alike.problem.bounds
    assert half.schedule.lanes == alike.schedule.lanes
    assert half.step_s == pytest.approx(2 * alike.step_s)
    assert alike.step_s == planned((), schedule).step_s


def test_a_fast_device_gets_more():
    plan = planned((3.0, 1.0))
    busy_s = [0.0, 0.0]
    for layer, device in zip(plan.problem.layers, plan.schedule.device_of_stage, strict=True):
        busy_s[device] += layer.busy_s
    assert 2 < busy_s[0] / busy_s[1] < 4.5
    total_s = 8 * sum(layer.busy_s for layer in LAYERS)
    assert total_s / 4 <= plan.step_s < 1.25 * total_s / 4
    # Cut for equal devices it takes about as long as twice the work on the slow one.
    blind = planned((), devices=2)
    bounds = [list(range(first, last + 1)) for first, last in blind.problem.bounds]
    names = [[LAYERS[i].name for i in stage] for stage in bounds]
    given_cut = dataclasses.replace(
        wanted(2, 8, 3.0, 1.0, schedule=blind.schedule.policy), stages=tuple(map(tuple, names))
    )
    assert make_plan(LAYERS, units_of(12, []), given_cut).step_s > 1.5 * plan.step_s


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=9),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=4),
)
def test_balanced_is_the_shortest_cut(seconds, speeds):
    layers = [LayerCosts(value, 0.0, 0.0) for value in seconds]
    if len(speeds) > len(seconds):
        with pytest.raises(OptionsError, match="use fewer devices"):
            balanced(layers, speeds)
        return

    def longest_s(bounds):
        return max(sum(seconds[a : b + 1]) / v for (a, b), v in zip(bounds, speeds, strict=True))

    def all_cuts(first, stages):
        if stages == 1:
            yield ((first, len(seconds) - 1),)
            return
        for last in range(first, len(seconds) - stages + 1):
            yield from (((first, last), *rest) for rest in all_cuts(last + 1, stages - 1))

    cut = balanced(layers, speeds)
    assert [a for a, _ in cut] == [0, *(b + 1 for _, b in cut[:-1])]
    assert cut[-1][1] == len(seconds) - 1
    assert longest_s(cut) <= min(map(longest_s, all_cuts(0, len(speeds)))) * (1 + 1e-9)


def test_simulated_tasks_take_as_long_as_their_device_needs():
    plan = planned((1.0, 1.0), "gpipe", 1)
    schedule, layers = plan.schedule, plan.problem.layers
    plain, half = (tf_ooo.simulate(schedule, layers, Link(speeds=speeds)) for speeds in ((), (1.0, 0.5)))
    own = layers[1].busy_s + layers[1].update_s
    assert half.busy_s[0] == pytest.approx(plain.busy_s[0])
    assert half.busy_s[1] == pytest.approx(2 * plain.busy_s[1]) == pytest.approx(2 * own)


def test_replicas_are_planned_for_the_slowest_of_each_place():
    mesh = make_mesh(LAYERS, units_of(12, []), wanted(4, 8, 1.0, 1.0, 1.0, 0.5), (2,))
    assert mesh.plan.problem.link.speeds == (1.0, 0.5)
    alone = make_plan(LAYERS, units_of(12, []), wanted(2, 4, 1.0, 0.5))
    assert mesh.step_s == pytest.approx(alone.step_s, rel=0.2)
    slower = mesh.slower_by()
    last = mesh.plan.schedule.device_of_stage.index(1)
    first_of_last = mesh.plan.problem.bounds[last][0]
    assert slower[first_of_last] == pytest.approx((1 / 1.0 + 1 / 0.5) / 2)
    assert slower[0] == 1.0


def test_the_file_of_costs_keeps_speeds():
    table = CostTable(tuple(LAYERS), Link(1e-3, speeds=(1.0, 0.25)))
    assert CostTable.from_json(table.to_json()) == table
    assert "speeds" not in CostTable(tuple(LAYERS)).to_json()
    with pytest.raises(CostError, match="speeds must be finite numbers above 0"):
        CostTable.from_json(table.to_json().replace("0.25", "0"))


def test_data_parallel_workers_have_no_speeds():
    with pytest.raises(OptionsError, match="wait for the slowest"):
        tf_ooo.plan(layers=LAYERS, devices=2, mode="data_parallel", link=Link(speeds=(1.0, 0.5)))


@pytest.mark.parametrize(
    ("speeds", "used"),
    [((1.0, 1.0, 0.02), (0, 1)), ((0.02, 1.0, 1.0), (1, 2)), ((1.0, 1.0, 0.9), ()), ((), ())],
)
def test_devices_that_are_in_the_way_are_left_out(speeds, used):
    asked = wanted(3, 6, *speeds)
    mesh = on_best_devices(LAYERS, units_of(12, []), asked)
    assert mesh.on == (used or (0, 1, 2))
    assert mesh.of("abc") == tuple("abc"[number] for number in mesh.on)
    everything = make_mesh(LAYERS, units_of(12, []), asked, (1, 3))
    assert mesh.step_s <= everything.step_s
    assert {row.count * row.devices for row in mesh.tried} >= {2, 3}


def test_more_devices_than_layers():
    layers = LAYERS[:2]
    mesh = on_best_devices(layers, units_of(2, []), wanted(5, 1))
    assert len(mesh.on) == 2
    with pytest.raises(OptionsError, match="use fewer devices"):
        make_mesh(layers, units_of(2, []), wanted(5, 1), (1,))


def test_fewer_devices_hold_no_more():
    asked = dataclasses.replace(wanted(3, 6), memory_limit_bytes=60)
    with pytest.raises(tf_ooo.MemoryLimitError) as raised:
        on_best_devices(LAYERS, units_of(12, []), asked)
    assert raised.value.smallest_bytes > 60


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({"a": 1.0, "b": 1.2}, {"a": 1.0, "b": 1.0}),
        ({"a": 1.0, "b": 0.5, "c": 0.52}, {"a": 1.0, "b": 0.51, "c": 0.51}),
        ({"a": 1.0, "b": 0.234}, {"a": 1.0, "b": 0.23}),
        ({"a": 1.0, "b": 3.0, "c": 3.2}, {"a": 1.0, "b": 3.1, "c": 3.1}),
    ],
)
def test_speeds_that_differ_as_measurements_do_are_alike(speeds, expected):
    assert levels(speeds) == expected
