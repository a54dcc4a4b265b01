"""The runtime takes time itself, for tasks, messages and steps: simulated, searched with, and measured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_ooo
from tf_ooo.costs.layer_costs import RUNTIME, LayerCosts, Link
from tf_ooo.hosts import runtime_costs
from tf_ooo.modes.pipeline.planning import PlanRequest, make_plan
from tf_ooo.planning.building.choice import least_of_all_cuts_s, least_s
from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import StepTasks
from tf_ooo.planning.choosing.plan import as_asked, policy_named
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate

EIGHTHS = st.integers(0, 8).map(lambda number: number / 8)
TIMES = st.fixed_dictionaries(dict.fromkeys(("latency_s", *RUNTIME), EIGHTHS))
SECONDS = st.integers(1, 8).map(lambda number: number / 4)
LAYERS = st.lists(st.builds(LayerCosts, SECONDS, SECONDS, SECONDS), min_size=6, max_size=6)
POLICIES = ("1f1b", "zb_h1", "zb_auto", "interleaved_1f1b", "zb_v")


def begins(timeline):
    return {str(event.task): (event.start_s, event.end_s) for event in timeline.events}


def test_a_message_takes_time_of_both_ends_and_each_task_some():
    """Worked out by hand: F of one second, a message, and F of two on the other device."""
    text = "tf_ooo schedule v1\nmode pipeline\npolicy own\nmicrobatches 1\n"
    text += "lane 0 0: F:0@0 dO:0@0 dW:0@0\nlane 1 0: F:1@0 dO:1@0 dW:1@0\n"
    layers = [LayerCosts(1, 0, 1), LayerCosts(2, 1, 1)]
    link = Link(0.5, send_s=0.25, receive_s=0.125, task_s=1.0, step_s=64.0)
    at = begins(simulate(Schedule.from_text(text), layers, link))
    assert at["F:0"] == (0, 1 + 1 + 0.25)
    assert at["F:1"] == (2.25 + 0.5, 2.75 + 2 + 1 + 0.125)
    assert at["dO:1"] == (5.875, 5.875 + 1 + 1 + 0.25)
    assert at["dO:0"] == (8.125 + 0.5, 8.625 + 0.125)  # it takes no time itself: no task


def test_what_two_layers_of_a_device_read_is_sent_once():
    text = "tf_ooo schedule v1\nmode pipeline\npolicy own\nmicrobatches 1\n"
    text += "lane 0 0: F:0@0 dO:0@0 dW:0@0\nlane 1 0: F:1@0 F:2@0 dO:2@0 dO:1@0 dW:1@0 dW:2@0\n"
    layers = [LayerCosts(1, 1, 1), LayerCosts(1, 1, 1), LayerCosts(1, 1, 1, inputs=(0, 1))]
    at = begins(simulate(Schedule.from_text(text), layers, Link(send_s=0.25, receive_s=0.5)))
    assert at["F:0"] == (0, 1.25)
    assert at["F:1"] == (1.25, 2.75)
    assert at["F:2"] == (2.75, 3.75)


def test_new_weights_take_time_of_both_ends_as_well():
    """An asynchronous U on one device sends its weights to the other, which computes F and dO."""
    text = "tf_ooo schedule v1\nmode layerpipe\npolicy own\nmicrobatches 2\nasynchronous yes\n"
    text += "lane 0 0: dW:0@0 U:0@0 dW:0@1 U:0@1\nlane 1 0: F:0@0 dO:0@0 F:0@1 dO:0@1\n"
    layers = [LayerCosts(1, 1, 1, update_s=1, weight_bytes=64)]

    def lengths(link):
        at = begins(simulate(Schedule.from_text(text), layers, link))
        return {task: end_s - start_s for task, (start_s, end_s) in at.items()}

    plain, link = lengths(Link()), Link(send_s=0.25, receive_s=0.5)
    more = {task: took_s - plain[task] for task, took_s in lengths(link).items()}
    # The weights are sent once, to F; dO sends the output gradient to dW.
    assert more == {
        f"{kind}:0{of}": more_s
        for kind, more_s in (("U", 0.25), ("F", 0.5), ("dO", 0.25), ("dW", 0.5))
        for of in ("", "@1")
    }


@pytest.mark.parametrize("name", RUNTIME)
def test_times_of_the_runtime_are_amounts(name):
    with pytest.raises(tf_ooo.CostError, match=name):
        Link(**{name: -1.0})


@settings(max_examples=25, deadline=None)
@given(LAYERS, TIMES, st.sampled_from(RUNTIME), EIGHTHS, st.sampled_from(POLICIES))
def test_a_schedule_takes_no_less_where_the_runtime_takes_more(layers, times, name, more_s, policy):
    link = Link(**times)
    schedule = tf_ooo.plan(layers=layers, schedule=policy, devices=2, microbatches=3, link=link)
    slower = replace(link, **{name: times[name] + more_s})
    assert simulate(schedule, layers, slower).makespan_s >= simulate(schedule, layers, link).makespan_s
    free = simulate(schedule, layers, link.without_runtime)
    assert free.makespan_s <= simulate(schedule, layers, link).makespan_s


@settings(max_examples=25, deadline=None)
@given(LAYERS, TIMES, st.permutations((0, 0, 1, 1, 2, 2)))
def test_searches_and_bounds_count_what_is_simulated(layers, times, place):
    """An order that a search has timed takes as long on paper, and none is faster than the bounds."""
    problem = Problem(tuple(layers), 3, 4, Link(**times), mode="pipeline")
    stages = StagedLayers(problem, tuple((number, number) for number in range(6)), tuple(place))
    tasks = StepTasks(stages)
    ran = tasks.run(place, tasks.urgent)
    schedule = stages.with_updates("own", tasks.orders(place, ran))
    simulated_s = simulate(schedule, layers, problem.link).makespan_s
    assert simulated_s == pytest.approx(ran.makespan_s)
    assert simulated_s >= least_s(stages) * (1 - 1e-9)
    assert simulated_s >= least_of_all_cuts_s(problem) * (1 - 1e-9)


BRANCHES = [None, None, (0, 1), (0,), (2, 3), (1, 4)]


@settings(max_examples=100, deadline=None)
@given(LAYERS, TIMES, st.permutations((0, 0, 1, 1, 2, 2)))
def test_bounds_hold_where_layers_read_several(layers, times, place):
    layers = tuple(replace(layer, inputs=read) for layer, read in zip(layers, BRANCHES, strict=True))
    problem = Problem(layers, 3, 4, Link(**times), mode="pipeline")
    stages = StagedLayers(problem, tuple((number, number) for number in range(6)), tuple(place))
    tasks = StepTasks(stages)
    schedule = stages.with_updates("own", tasks.orders(place, tasks.run(place, tasks.urgent)))
    assert simulate(schedule, layers, problem.link).makespan_s >= least_s(stages) * (1 - 1e-9)


def test_auto_takes_fewer_stages_where_messages_take_time():
    """Four stages a device fill the pipeline sooner, and send four times as much as one."""
    layers = [LayerCosts(1.0, 1.0, 1.0, name=f"layer_{number}") for number in range(16)]
    units = tuple((number, number) for number in range(16))
    free = make_plan(layers, units, PlanRequest("auto", 4, 4))
    slow = make_plan(layers, units, PlanRequest("auto", 4, 4, Link(send_s=0.3, receive_s=0.3, step_s=2.0)))
    assert len(free.problem.bounds) == 16
    assert len(slow.problem.bounds) == 8
    assert slow.step_s == pytest.approx(slow.timeline.makespan_s + 2.0)
    kept = simulate(free.trial.schedule, free.problem.layers, slow.problem.link)
    assert slow.timeline.makespan_s < kept.makespan_s


@pytest.mark.parametrize("limit_bytes", [None, 1 << 62, 60])
def test_one_device_is_planned_whatever_the_runtime_takes(limit_bytes):
    """A replica of one device is: there, the time of all tasks is no bound that a search ends at."""
    layers = [LayerCosts(seconds, 0.5, 0.25, activation_bytes=10) for seconds in (0.25, 0.5, 1.0, 0.25)]
    link = Link(task_s=0.125, step_s=2.0)
    problem = Problem(layers, 1, 4, link, memory_limit_bytes=limit_bytes)
    trial = as_asked(policy_named("zb_search"), problem).trial
    assert trial.timeline.makespan_s == 4 * 5.0 + 4 * 3 * 0.125  # one stage


MEASURED = Link(1e-3, 1e9, send_s=1e-4, receive_s=5e-5, task_s=2e-6, step_s=3e-3)


def test_the_runtime_is_measured(monkeypatch):
    """Functions stand for the seconds that they would take."""
    ends_s = MEASURED.send_s + MEASURED.receive_s
    step_s = MEASURED.step_s + 4 * (MEASURED.latency_s + ends_s) + 3 * ends_s
    monkeypatch.setattr(runtime_costs, "_called", lambda seconds: seconds)
    monkeypatch.setattr(runtime_costs, "seconds_of", lambda seconds: seconds)
    monkeypatch.setattr(runtime_costs.runtime, "calls_not_optimized", nullcontext)
    monkeypatch.setattr(runtime_costs, "_sends", lambda a, b, count: 0.5 + count * MEASURED.send_s)
    monkeypatch.setattr(runtime_costs, "_receives", lambda a, b, count: 0.5 + count * MEASURED.receive_s)
    monkeypatch.setattr(runtime_costs, "_tasks", lambda a, count: 0.5 + count * MEASURED.task_s)
    monkeypatch.setattr(runtime_costs, "_step", lambda devices: step_s)
    link = runtime_costs.with_runtime(Link(MEASURED.latency_s + ends_s, 1e9), ["a", "b", "c"])
    for name in ("latency_s", *RUNTIME):
        assert getattr(link, name) == pytest.approx(getattr(MEASURED, name)), name
