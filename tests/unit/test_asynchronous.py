"""PipeDream and LayerPipe: periods worked out by hand, memory of weight versions, bytes, bad input."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OptionsError
from tf_ooo.planning.building.layerpipe_cuts import TaskLine, best_cuts, left_shares
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate, validate
from tf_ooo.rewriting.plan import plan

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("pipedream", "layerpipe")
# Work 6, 4 and 14.
UNEQUAL = (LayerCosts(1.0, 2.0, 3.0), LayerCosts(2.0, 1.0, 1.0), LayerCosts(4.0, 6.0, 4.0))


def made(name, layers, devices, microbatches, **more):
    return POLICIES[name].make(Problem(tuple(layers), devices, microbatches, **more))


def period_s(name, layers, devices, **more):
    schedule = made(name, layers, devices, 60, **more)
    return simulate(schedule, layers, more.get("link")).steady_step_s


def test_pipedream_by_hand():
    # Stages 0-1 and 2: 10 and 14 seconds; three stages: 6, 4 and 14.
    assert period_s("pipedream", UNEQUAL, 1) == pytest.approx(24)
    assert period_s("pipedream", UNEQUAL, 2) == pytest.approx(14)
    assert period_s("pipedream", UNEQUAL, 3) == pytest.approx(14)
    schedule = made("pipedream", UNEQUAL, 2, 4)
    assert schedule.stages == ((0, 1), (2, 2))
    first = "F:0 F:0@1 dO:0 dW:0 U:0 F:0@2 dO:0@1 dW:0@1 U:0@1 F:0@3"
    assert " ".join(map(str, schedule.lanes[0, 0][:10])) == first
    # One micro-batch: F of 3 seconds, then 4 + 10, then 7.
    timeline = simulate(made("pipedream", UNEQUAL, 2, 1), UNEQUAL)
    assert timeline.makespan_s == 3 + 4 + 10 + 7


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_end_no_faster_than_shared_cores_allow(name):
    """The last of twelve on three devices end faster than any could for long: the others are done.

    F, dO and dW need all, half and a quarter of both cores: 1 + 2 / 2 + 3 / 4 seconds, and so on.
    """
    layers = tuple(dataclasses.replace(layer, occupancy=(1.0, 0.5, 0.25)) for layer in UNEQUAL)
    link = Link(machines=(0, 0, 0), cores=2)
    timeline = simulate(made(name, layers, 3, 12, link=link), layers, link)
    work_s = (1 + 2 / 2 + 3 / 4) + (2 + 1 / 2 + 1 / 4) + (4 + 6 / 2 + 4 / 4)
    assert timeline.fullest_s == pytest.approx(12 * work_s)
    assert timeline.steady_step_s >= work_s * (1 - 1e-9)


def test_layerpipe_by_hand():
    # 24 seconds on two processors: 12 each, the last layer gives 2 of its 14 seconds away.
    assert period_s("layerpipe", UNEQUAL, 2) == pytest.approx(12)
    # 8 each: no task but the last layer's dO (6) must be cut.
    assert period_s("layerpipe", UNEQUAL, 3) == pytest.approx(8)
    # The dO of 6 seconds is all that can be cut: F and dW of 4 seconds bound it, whatever the processors.
    assert period_s("layerpipe", UNEQUAL[2:], 4) == pytest.approx(4)
    assert period_s("layerpipe", UNEQUAL, 6) >= 24 / 6


def test_updates_are_part_of_the_work():
    layers = [LayerCosts(1.0, 1.0, 1.0, update_s=2.0), LayerCosts(1.0, 1.0, 1.0)]
    assert period_s("pipedream", layers, 2) == pytest.approx(5)
    assert period_s("layerpipe", layers, 2) == pytest.approx(4)


@pytest.mark.parametrize("bytes_per_s", [2.0, 1.0])
def test_messages_are_hidden_until_they_take_longer_than_a_round(bytes_per_s):
    layers = [LayerCosts(1.0, 1.0, 1.0, output_bytes=4) for _ in range(4)]
    link = Link(0.5, bytes_per_s)
    found = period_s("layerpipe", layers, 4, link=link, options={"slack_percent": 0})
    assert found == pytest.approx(max(3.0, 4 / bytes_per_s))


def test_weight_versions_and_gradients_are_counted():
    layers = [LayerCosts(1.0, 1.0, 1.0, weight_bytes=100) for _ in range(3)]
    timeline = simulate(made("pipedream", layers, 3, 20), layers)
    # Stage s has 3 - s micro-batches in flight: as many versions, and the gradient of one.
    assert timeline.peak_bytes == [400, 300, 200]


def test_parts_send_their_share_and_inputs_come_from_their_maker():
    layers = [LayerCosts(1.0, 1.0, 1.0, output_bytes=10), LayerCosts(1.0, 4.0, 1.0, output_bytes=6)]
    lanes = {
        (0, 0): [Task("F", 0), Task("dO", 1), Task("dO", 0), Task("dW", 0), Task("U", 0)],
        (1, 0): [Task("F", 1), Task("dO", 1, 0, 1)],
        (2, 0): [Task("dW", 1), Task("U", 1)],
    }
    parts = {("dO", 1): (0.25, 0.75)}
    schedule = Schedule("layerpipe", "hand", lanes, asynchronous=True, parts=parts)
    validate(schedule, layers)
    timeline = simulate(schedule, layers, Link(bytes_per_s=1e9))
    sent = Counter()
    for message in timeline.messages:
        sent[message.source, message.target] += message.size_bytes
    # Output of F:0 to F:1 and dW:1; dO:1.1's share of the gradient that dO:0 reads.
    assert {pair: size for pair, size in sent.items() if size} == {(0, 1): 10, (0, 2): 10, (1, 0): 7.5}


seconds = st.floats(0.1, 5.0)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 6))
    layers = [
        LayerCosts(draw(seconds), draw(seconds), draw(seconds), 0.1, 2, 3, draw(st.integers(0, 4)))
        for _ in range(count)
    ]
    link = draw(st.sampled_from([Link(), Link(0.2, 3.0)]))
    return Problem(tuple(layers), draw(st.integers(1, count)), draw(st.integers(1, 7)), link)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(NAMES))
def test_valid_and_complete(problem, name):
    schedule = POLICIES[name].make(problem)
    validate(schedule, problem.layers)
    stages = len(schedule.stages) or len(problem.layers)
    whole = Counter()
    for task in schedule.tasks:
        share = schedule.parts.get((task.kind, task.stage), (1.0,))[task.part]
        whole[task.kind, task.stage, task.microbatch] += share
    expected = [
        (kind, stage, m)
        for kind in ("F", "dO", "dW", "U")
        for stage in range(stages)
        for m in range(problem.microbatches)
    ]
    assert sorted(whole) == sorted(expected)
    assert all(total == pytest.approx(1) for total in whole.values())
    assert len(set(schedule.tasks)) == len(schedule.tasks)
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert len(schedule.lanes) == problem.devices


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from(NAMES), st.integers(1, 60))
def test_memory_limit_is_kept_or_refused(problem, name, limit):
    ask = {"layers": list(problem.layers), "devices": problem.devices, "link": problem.link}
    ask |= {"microbatches": problem.microbatches, "schedule": name, "mode": "layerpipe"}
    try:
        schedule = plan(**ask, memory_limit_bytes=limit)
    except MemoryLimitError as error:
        limit = error.smallest_bytes
        schedule = plan(**ask, memory_limit_bytes=limit)
    assert max(simulate(schedule, problem.layers, problem.link).peak_bytes) <= limit


@settings(max_examples=30, deadline=None)
@given(problems())
def test_layerpipe_is_never_slower_than_pipedream(problem):
    layers = problem.layers
    slowest = {name: period_s(name, layers, problem.devices) for name in NAMES}
    assert slowest["layerpipe"] <= slowest["pipedream"] * (1 + 1e-6)
    work = sum(c.forward_s + c.output_grad_s + c.weight_grad_s + c.update_s for c in layers)
    assert slowest["layerpipe"] >= work / problem.devices * (1 - 1e-6)


def test_cuts_are_found_by_hand():
    line = TaskLine.of(UNEQUAL, inside=True)
    (cut,) = best_cuts(line, 2)
    assert cut.at_s == pytest.approx(12)
    assert cut.layer == 2
    assert left_shares(cut) == pytest.approx({kind: cut.share if kind == "dO" else 0 for kind in cut.order})
    assert best_cuts(TaskLine.of(UNEQUAL, inside=False), 4) is None


def test_delays_are_two_rounds_for_each_processor_above():
    layers = [LayerCosts(1.0, 1.0, 1.0) for _ in range(4)]
    schedule = made("layerpipe", layers, 4, 20)
    for stage in range(4):
        lane = list(schedule.lanes[stage, 0])
        place = {task: i for i, task in enumerate(lane)}
        for m in range(6, 10):
            between = lane[place[Task("F", stage, m)] : place[Task("U", stage, m)]]
            assert sum(task.kind == "U" for task in between) == 2 * (3 - stage)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input(name):
    with pytest.raises(OptionsError, match="40 (stages|processors) are more than"):
        made(name, UNEQUAL, 40, 2)
    with pytest.raises(OptionsError, match="is one of mode layerpipe"):
        plan(layers=list(UNEQUAL), schedule=name, devices=2, mode="pipeline")


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    assert made(name, UNEQUAL, 3, 5).to_text() == (GOLDEN / f"{name}.txt").read_text()


def test_weights_and_their_versions_lie_where_they_are_read_and_updated():
    layers = [LayerCosts(1.0, 1.0, 1.0, weight_bytes=100, slot_bytes=7)]
    tasks = [(0, "F"), (1, "dO"), (2, "dW"), (2, "U")]
    lanes = {}
    for device, kind in tasks:
        lanes.setdefault((device, 0), []).extend(Task(kind, 0, m) for m in range(4))
    lanes[2, 0] = [Task(kind, 0, m) for m in range(4) for kind in ("dW", "U")]
    schedule = Schedule("layerpipe", "hand", lanes, microbatches=4, asynchronous=True)
    # Updates at 3, 4, 5, 6.  F:0@0 to @2 read the first version, needed until dW:0@2 ends at 5; F:0@3
    # starts with the second at 3 and needs it until 6: from 4 to 5 both are kept beside the newest.
    peaks = simulate(schedule, layers).peak_bytes
    assert peaks[2] == 100 + 100 + 7  # weights, one gradient, slots
    assert peaks[:2] == [300, 300]


def test_a_link_of_millions_of_rounds_under_a_memory_limit():
    """A message takes two million times as long as a round: this once simulated each of them."""
    layers = [LayerCosts(0, 0, 0, update_s=0.5, activation_bytes=9, weight_bytes=5, output_bytes=4)] * 4
    with pytest.raises(MemoryLimitError) as raised:
        plan(
            layers=layers,
            schedule="layerpipe",
            devices=2,
            microbatches=3,
            link=Link(1e6),
            memory_limit_bytes=1,
        )
    assert raised.value.smallest_bytes > 1


def test_tasks_of_a_nanosecond_beside_tasks_of_a_million_seconds():
    """Once a cut at the end of the short F was taken for one between the layers, and F was divided."""
    layers = [LayerCosts(1, 0, 0), LayerCosts(1e-9, 1, 1e6)]
    for devices in range(1, 4):
        made = plan(layers=layers, schedule="layerpipe", devices=devices, microbatches=2)
        validate(made, layers)
        assert not any(task.part for task in made.tasks if task.kind != "dO")
    with pytest.raises(OptionsError, match="more than the tasks"):
        plan(layers=layers, schedule="layerpipe", devices=9, microbatches=2)
