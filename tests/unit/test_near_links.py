"""Links that differ: devices of one host are nearer to each other than to those of another one."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_ooo
from tf_ooo import LayerCosts, Link
from tf_ooo.cli.inputs import with_devices
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError
from tf_ooo.hosts import runtime_costs
from tf_ooo.hosts.speeds import sharing_cores
from tf_ooo.planning.model.task import Task
from tf_ooo.report.sections import LinkRow

FAR = Link(5e-3, 1e6, 1e-8, send_s=2e-4, receive_s=1e-4, task_s=1e-5)
NEAR = Link(1e-4, 1e9)
# Devices 0 to 3 are on one host, two in each process; 4 and 5 are processes of another one, 6 is alone.
TIERS = replace(
    FAR, near=Link(1e-3, 1e8, 1e-9, near=NEAR, groups=(0, 0, 1, 1, 2, 3)), groups=(0, 0, 0, 0, 1, 1)
)
MESSAGE = ("latency_s", "bytes_per_s", "overhead_s_per_byte", "send_s", "receive_s")
LAYERS = [
    LayerCosts(1e-3 * (1 + i % 3), 1e-3 * (1 + i % 2), 5e-4 * (1 + i % 4), 2e-4, 1000, 5000 + 900 * i, 100)
    for i in range(10)
]


def test_the_nearest_link_joins_two_devices():
    one_by_other = np.divmod(np.arange(49), 7)
    tiers = TIERS.of_pairs("latency_s", *one_by_other).reshape(7, 7)
    for one, other in itertools.permutations(range(7), 2):
        same_process, same_host = (
            {one, other} in ({0, 1}, {2, 3}),
            max(one, other) < 4 or {one, other} == {4, 5},
        )
        expected = 1e-4 if same_process else 1e-3 if same_host else 5e-3
        assert tiers[one, other] == TIERS.between(one, other).latency_s == expected
    assert all((FAR.of_pairs(name, *one_by_other) == getattr(FAR, name)).all() for name in MESSAGE)


@pytest.mark.parametrize("changed", ["free", "without_runtime", "of_idle_ends"])
def test_what_changes_a_link_changes_the_nearer_ones(changed):
    link, own = (
        getattr(TIERS, changed),
        [getattr(TIERS.between(*pair), changed) for pair in ((0, 6), (0, 2), (0, 1))],
    )
    for pair, expected in zip(((0, 6), (0, 2), (0, 1)), own, strict=True):
        assert [getattr(link.between(*pair), name) for name in MESSAGE] == [
            getattr(expected, name) for name in MESSAGE
        ]
    assert TIERS.slowed(3).between(2, 3).seconds(1e9) == pytest.approx(3 * NEAR.seconds(1e9))


def test_devices_that_are_left_keep_their_links():
    some = TIERS.among([6, 3, 2, 5])
    assert [some.between(*pair).latency_s for pair in ((0, 1), (1, 2), (2, 3))] == [5e-3, 1e-4, 5e-3]
    # Two replicas of three places each: 0 and 3, 1 and 4, 2 and 5.
    twice = TIERS.of_replica(3, 2)
    assert [twice.between(*pair).latency_s for pair in ((0, 1), (0, 2), (1, 2))] == [5e-3, 5e-3, 1e-3]


def test_a_table_keeps_links_and_the_report_shows_them():
    table = CostTable(tuple(LAYERS), TIERS)
    assert CostTable.from_json(table.to_json()) == table
    content = json.loads(table.to_json())
    content["link"]["near"]["latency_s"] = -1
    with pytest.raises(CostError, match="near: link: latency_s: must be"):
        CostTable.from_json(json.dumps(content))
    row = LinkRow.of(TIERS)
    assert json.loads(json.dumps(row.to_dict()))["near"]["near"]["latency_s"] == 1e-4
    assert row.text().count("within a group of near devices") == 2


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"near": NEAR}, "near, the link within groups, and groups belong together"),
        ({"groups": (0, 0)}, "near, the link within groups, and groups belong together"),
        ({"near": NEAR, "groups": (0, -1)}, "groups are whole numbers, one for each device"),
        ({"near": NEAR, "groups": (0, 0.5)}, "groups are whole numbers, one for each device"),
        ({"near": Link(speeds=(1.0,)), "groups": (0, 0)}, "near has messages only"),
        ({"near": Link(step_s=1.0), "groups": (0, 0)}, "near has messages only"),
        ({"near": 3e-6, "groups": (0, 0)}, "near must be a Link"),
    ],
)
def test_what_no_link_can_be(given_, message):
    with pytest.raises(CostError, match=message):
        Link(1e-3, **given_)


def test_near_devices_need_a_link_between_their_groups():
    table = CostTable(tuple(LAYERS))
    with pytest.raises(CostError, match="--near needs --link"):
        with_devices(table, 4, None, (2, NEAR), None)
    assert with_devices(table, 5, FAR, (2, NEAR), None).link.groups == (0, 0, 1, 1, 2)


def test_messages_by_hand():
    """Three stages: from 0 to 1 it is near, from 1 to 2 far; what the ends spend is computing time."""
    layers, link = LAYERS[:3], replace(FAR, near=NEAR, groups=(0, 0, 1), task_s=0.0)
    planned = tf_ooo.plan(
        layers=layers, mode="pipeline", schedule="gpipe", devices=3, microbatches=1, link=link
    )
    ends = [FAR.overhead_s_per_byte * layers[1].output_bytes + s for s in (FAR.send_s, FAR.receive_s)]
    expected_s = sum(layer.forward_s for layer in layers) + sum(ends)
    expected_s += NEAR.seconds(layers[0].output_bytes) + FAR.seconds(layers[1].output_bytes)
    timeline = tf_ooo.simulate(planned, layers, link)
    last = list(planned.tasks).index(Task("F", 2))
    assert timeline.end_s[0][last] == pytest.approx(expected_s)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "zb_h1", "interleaved_1f1b", "zb_auto", "layerpipe"]))
def test_a_near_link_that_is_no_nearer_changes_nothing(seed, schedule):
    draw = random.Random(seed)
    link = Link(
        draw.choice([0, 1e-4, 2e-3]), draw.choice([1e6, 1e9, float("inf")]), send_s=draw.choice([0, 1e-4])
    )
    groups = tuple(draw.randrange(2) for _ in range(3))
    count = {} if schedule == "layerpipe" else {"microbatches": draw.randint(3, 6)}
    mode = "layerpipe" if schedule == "layerpipe" else "pipeline"
    planned = tf_ooo.plan(layers=LAYERS, mode=mode, schedule=schedule, devices=3, link=link, **count)
    plain = tf_ooo.simulate(planned, LAYERS, link, 3)
    alike = tf_ooo.simulate(planned, LAYERS, replace(link, near=link, groups=groups), 3)
    assert np.array_equal(alike.start_s, plain.start_s)
    assert np.array_equal(alike.end_s, plain.end_s)


def test_the_search_finds_the_near_devices_however_they_are_listed():
    def step_s(link, groups):
        planned = tf_ooo.plan(layers=LAYERS, mode="pipeline", devices=4, microbatches=4, link=link)
        return [
            tf_ooo.simulate(planned, LAYERS, replace(FAR, near=NEAR, groups=each)).makespan_s
            for each in groups
        ]

    ways = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    ours_s = [step_s(replace(FAR, near=NEAR, groups=groups), [groups])[0] for groups in ways]
    assert all(ours < blind for ours, blind in zip(ours_s, step_s(FAR, ways), strict=True))
    assert max(ours_s) <= 1.02 * min(ours_s)


def test_of_each_kind_of_link_one_is_measured(monkeypatch):
    """Devices are listed so that the first and the last one are near: another pair tells of the network."""
    jobs = ["worker/replica:0/task:{}/device:CPU:{}".format(*of) for of in [(0, 0), (1, 0), (2, 0), (0, 1)]]
    names, measured = [f"/job:{job}" for job in jobs], []

    def link(one, other):
        measured.append((names.index(one), names.index(other)))
        return Link(5e-3, 1e6) if names[2] in (one, other) else Link(1e-3, 1e8)

    def with_ends(far, devices, ends):
        assert names[2] in ends
        return replace(far, send_s=2e-4, receive_s=1e-4)

    monkeypatch.setattr(runtime_costs, "measure_device_link", link)
    monkeypatch.setattr(runtime_costs, "with_runtime", with_ends)
    tiers = runtime_costs.measured_link(names, ["a", "a", "b", "a"])
    assert measured == [(0, 2), (0, 1)]
    assert tiers.groups == (0, 0, 2, 0)
    assert tiers.between(0, 3) == Link(30e-6)  # of one process
    assert tiers.between(1, 3).seconds(0) == pytest.approx(7e-4)  # 1 ms, of which the ends spend 0.3 ms
    assert tiers.between(1, 3).send_s == tiers.send_s == 2e-4
    assert tiers.between(3, 2).latency_s == 5e-3
    # No host has several processes here, and no process several devices.
    alone = runtime_costs.measured_link(names[1:3], ["a", "b"])
    assert alone.near is None


def test_cpus_of_one_host_spend_their_cores_on_near_messages():
    names = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(4)]
    near = Link(1e-3, 1e8, 1e-9)
    shared = sharing_cores(replace(FAR, near=near, groups=(0, 0, 1, 1)), names, ["a", "a", "b", "b"])
    assert shared.machines == (0, 0, 2, 2)
    assert shared.overhead_s_per_byte == FAR.overhead_s_per_byte
    assert shared.near == replace(near, overhead_s_per_byte=0.0)
