"""Start times against a clock written another way, which looks at everything at each instant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo.planning.simulation.clock import LaneKind, LaneWork, Tasks, run


def clock(work):
    """Moves the clock to the next instant at which anything changes; looks at everything each time."""
    count, lanes = len(work.duration_s), len(work.lane_starts) - 1
    edges = list(zip(work.source, work.target, work.lag_s, strict=True))
    start, end, now = [None] * count, [None] * count, 0.0

    def arrival(node):
        times = [
            np.inf if end[s] is None else end[s] + (lag if work.lane_of[s] != work.lane_of[t] else 0.0)
            for s, t, lag in edges
            if t == node
        ]
        return max(times, default=0.0)

    while True:
        for lane in range(lanes):
            nodes = range(work.lane_starts[lane], work.lane_starts[lane + 1])
            if any(start[n] is not None and end[n] > now for n in nodes):
                continue
            todo = [n for n in nodes if start[n] is None]
            ready = [n for n in todo if arrival(n) <= now]
            kind = work.lane_kinds[lane]
            if kind == LaneKind.ORDERED:
                ready = [n for n in ready if n == todo[0]]
            if kind == LaneKind.FIFO:
                ready.sort(key=arrival)
            if ready:
                start[ready[0]], end[ready[0]] = now, now + work.duration_s[ready[0]]
        later = [t for n in range(count) for t in (arrival(n), end[n]) if t is not None and now < t < np.inf]
        if not later:
            return np.array([np.nan if t is None else t for t in start])
        now = min(later)


@st.composite
def works(draw, kinds=(LaneKind.ORDERED, LaneKind.PRIORITY, LaneKind.FIFO)):
    """Random lanes and edges; most can run to the end, some are deadlocks."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    count = sum(lengths)
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    # A hidden order in which everything could run; a few edges may go against it.
    place = random.permutation(count)
    pairs = [
        (a, b) for a in range(count) for b in range(count) if place[a] < place[b] and random.random() < 0.25
    ]
    if draw(st.booleans()):
        starts = np.concatenate([[0], np.cumsum(lengths)])
        for a, b in zip(starts, starts[1:], strict=False):
            place[a:b] = np.sort(place[a:b])
        pairs = [(a, b) for a, b in pairs if place[a] < place[b]]
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    return LaneWork(
        duration_s=random.uniform(0.1, 5, count),
        lane_starts=np.concatenate([[0], np.cumsum(lengths)]),
        lane_kinds=np.array([draw(st.sampled_from(kinds)) for _ in lengths], np.int8),
        source=edges[:, 0],
        target=edges[:, 1],
        lag_s=random.uniform(0, 2, len(edges)) * random.integers(0, 2, len(edges)),
    )


@settings(max_examples=600, deadline=None)
@given(works())
def test_as_the_other_clock_says(work):
    start, end = work.times()
    np.testing.assert_allclose(start, clock(work), rtol=1e-12)
    np.testing.assert_allclose(end - start, np.where(np.isnan(start), np.nan, work.duration_s))


@settings(max_examples=300, deadline=None)
@given(works())
def test_devices_with_room_for_all_change_no_float(work):
    """Lanes that share a device wait for the clock, where others run ahead of it."""
    count = len(work.duration_s)
    lanes = np.zeros(len(work.lane_starts) - 1, np.int32)
    shared = dataclasses.replace(work, shared=(np.full(count, 1e-3), lanes))
    for alone, together in zip(work.times(), shared.times(), strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-12)


def _pair(occupancy, devices=(0, 0)):
    """Two lanes: 4 s beside 2 s and then 3 s."""
    return LaneWork(
        duration_s=np.array([4.0, 2.0, 3.0]),
        lane_starts=np.array([0, 1, 3]),
        lane_kinds=np.zeros(2, np.int8),
        source=np.zeros(0, np.int64),
        target=np.zeros(0, np.int64),
        lag_s=np.zeros(0),
        shared=(np.array(occupancy), np.array(devices, np.int32)),
    )


@pytest.mark.parametrize(
    ("occupancy", "ends"),
    [
        # All fit beside each other.
        ((0.5, 0.5, 0.5), (4, 2, 5)),
        # Each needs the whole device: half speed while two run.  2 s of work take until 4, then 2 s of
        # the first are left: until 8; the third has done 2 of 3 by then and runs alone: until 9.
        ((1.0, 1.0, 1.0), (8, 4, 9)),
        # 0.9 + 0.6 = 1.5: two thirds of the speed.  The second ends at 3; the first has 2 s left, the
        # third needs 0.1, so both run at full speed: until 5 and 6.
        ((0.9, 0.6, 0.1), (5, 3, 6)),
    ],
)
def test_streams_share_a_device(occupancy, ends):
    np.testing.assert_allclose(_pair(occupancy).times()[1], ends)


def test_other_devices_are_not_shared():
    np.testing.assert_allclose(_pair((1.0, 1.0, 1.0), devices=(0, 1)).times()[1], (4, 2, 5))


def test_where_nothing_runs_no_time_passes():
    nothing = np.zeros(0, np.int64)
    assert run(Tasks(np.zeros(0), nothing, nothing, np.zeros(0)), []).makespan_s == 0
    assert run(Tasks(np.array([2.0, 3.0]), nothing, nothing, np.zeros(0)), [[0], [1]]).makespan_s == 3
