"""``schedule="auto"``: what is compared, by what, and how long it takes."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import random

import pytest

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError
from tf_ooo.planning.choosing.on_paper import candidates
from tf_ooo.planning.choosing.plan import choose, step_s
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

SLOW = {"modulo", "zb_auto", "zb_search", "zb_v", "v_half", "v_min"}


def unequal(count):
    draw = random.Random(count)
    return tuple(
        LayerCosts(
            draw.uniform(1, 2), draw.uniform(1, 2), draw.uniform(0.5, 2), 0.01,
            activation_bytes=100, weight_bytes=1000, output_bytes=10,
        )
        for _ in range(count)
    )  # fmt: skip


@pytest.mark.parametrize("microbatches", [32, 512])
def test_eight_devices_take_seconds(microbatches):
    """About a million calls of Python functions a second; 84 s were once needed for a count in between.

    17 million calls for 32 micro-batches, and 13 million for 512, where what takes long is left out; most
    of them are heaps', which take less.
    """
    problem = Problem(unequal(16), 8, microbatches, Link(0.001, 1e4))
    profile = cProfile.Profile()
    found = profile.runcall(candidates, problem)
    assert pstats.Stats(profile).total_calls < 20e6
    assert choose(found).schedule.predicted_step_s == found[0].step_s
    left_out = {c.name for c in found if c.reason}
    assert left_out == (SLOW if microbatches > 32 else set())
    tasks = f"{3 * 8 * microbatches:,}"
    assert all(c.reason == f"not tried: takes long for {tasks} tasks; ask for it by name"
               for c in found if c.reason)  # fmt: skip


def test_what_takes_long_is_tried_where_nothing_else_fits(monkeypatch):
    """Four layers on two devices: each stores 2 bytes of one micro-batch, whatever the schedule."""
    for name in SLOW:
        monkeypatch.setitem(POLICIES, name, dataclasses.replace(POLICIES[name], auto_tasks=10))
    problem = Problem((LayerCosts(1, 1, 1, activation_bytes=1),) * 4, 2, 5)
    assert {c.name for c in candidates(problem) if "not tried" in c.reason} == SLOW
    problem = dataclasses.replace(problem, memory_limit_bytes=1)
    found = candidates(problem)
    assert not any("not tried" in c.reason for c in found)
    with pytest.raises(MemoryLimitError) as raised:
        choose(found)
    smallest = raised.value.smallest_bytes
    errors = [c.error for c in found if isinstance(c.error, MemoryLimitError)]
    assert smallest == min(error.smallest_bytes for error in errors) == 2


def test_steps_without_a_barrier_count():
    """ZB-H2 has no bubble between equal steps; ZB-H1 ends its first step earlier."""
    layers, run = [LayerCosts(2, 2, 2)] * 4, {"devices": 4, "microbatches": 12}
    made = {name: plan(layers=layers, schedule=name, **run) for name in ("zb_h1", "zb_h2")}
    timelines = {name: simulate(schedule, layers) for name, schedule in made.items()}
    assert made["zb_h2"].predicted_step_s == timelines["zb_h2"].steady_step_s == 12 * 6
    assert made["zb_h1"].predicted_step_s == 12 * 6 + 3 * 2
    assert timelines["zb_h2"].makespan_s == 12 * 6 + 3 * 2
    assert plan(layers=layers, schedule="auto", **run).predicted_step_s == 12 * 6


def test_above_the_size_that_is_repeated_it_is_the_longest_span(monkeypatch):
    layers = [LayerCosts(2, 2, 2)] * 4
    timeline = simulate(plan(layers=layers, schedule="zb_h2", devices=4, microbatches=12), layers)
    monkeypatch.setattr("tf_ooo.planning.choosing.plan._TASKS_TO_REPEAT", 1)
    assert step_s(timeline) == 12 * 6
    two = plan(layers=layers, schedule="multi_stream", mode="single_device")
    assert step_s(simulate(two, layers)) == simulate(two, layers).makespan_s
