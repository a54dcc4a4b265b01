"""Layers whose forward runs again: what it costs and saves, by hand, and which are chosen under a limit."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_ooo
from tf_ooo.cli import main
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, MemoryLimitError, OptionsError, ScheduleError
from tf_ooo.planning.choosing.figures import one_device_s
from tf_ooo.planning.choosing.recomputing import worth_it
from tf_ooo.planning.model.problem import Problem, saved_bytes, with_recomputed
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import schedules_of

# The first keeps none of the 40 bytes of its data, the second the 6 that it reads; dW needs 10 of them.
FIRST = tf_ooo.LayerCosts(
    1.0, 2.0, 3.0, activation_bytes=40, output_bytes=6, weight_grad_bytes=10, name="first"
)
SECOND = tf_ooo.LayerCosts(4.0, 5.0, 6.0, activation_bytes=30, weight_grad_bytes=20, name="second")
TWO = (FIRST, SECOND)
DEEP = [
    tf_ooo.LayerCosts(
        1.0 + i % 3,
        2.0,
        1.5,
        0.125,
        activation_bytes=20 + 5 * (i % 4),
        weight_bytes=3,
        output_bytes=4,
        weight_grad_bytes=10,
        name=f"l{i}",
    )
    for i in range(8)
]


def planned(layers=DEEP, **asked):
    return tf_ooo.plan(layers=layers, **{"devices": 2, "microbatches": 4, "schedule": "1f1b", **asked})


def test_costs_of_a_layer_that_is_computed_again():
    again = with_recomputed(TWO, (0, 1))
    assert [layer.output_grad_s for layer in again] == [3.0, 9.0]
    assert [layer.stored_bytes for layer in again] == [0, 6]
    assert [layer.recomputed_bytes for layer in again] == [40, 24] == [saved_bytes(TWO, i) for i in range(2)]
    assert [layer.kept_bytes for layer in again] == [10, 20]
    assert with_recomputed(again, (0, 1)) == again
    assert with_recomputed(TWO, ()) == TWO
    twice = again[1].scaled(2.0)
    assert (twice.recomputed_s, twice.recomputed_bytes, twice.stored_bytes) == (8.0, 48, 12)


def test_seconds_and_bytes_by_hand():
    """One device, forward of both, then dO and dW of each: stored, there again while dO runs, kept for dW."""
    tasks = "F:0 F:1 dO:1 dW:1 dO:0 dW:0"
    text = f"tf_ooo schedule v1\nmode single_device\npolicy mine\nrecompute 0 1\nlane 0 0: {tasks}\n"
    schedule = Schedule.from_text(text)
    assert schedule.recompute == (0, 1)
    assert schedule.to_text() == text
    timeline = tf_ooo.simulate(schedule, TWO)
    assert timeline.makespan_s == 1 + 4 + (4 + 5) + 6 + (1 + 2) + 3
    curve = timeline.memory[0]
    alive = dict(zip(curve.time_s.tolist(), curve.alive_bytes.tolist(), strict=True))
    # F of the second, its dO, its dW, dO and dW of the first, the end.
    assert alive == {1: 6, 5: 30, 14: 20, 20: 40, 23: 10, 26: 0}
    without = tf_ooo.simulate(dataclasses.replace(schedule, recompute=()), TWO)
    assert without.makespan_s == timeline.makespan_s - 5
    assert without.peak_bytes == [70]
    only = tf_ooo.simulate(dataclasses.replace(schedule, recompute=(0,)), TWO)
    assert only.peak_bytes == [40]
    assert one_device_s(schedule, with_recomputed(TWO, (0, 1))) == 21


def test_only_a_stage_that_has_a_dO_runs_again():
    """It is part of the dO."""
    text = "tf_ooo schedule v1\nmode single_device\npolicy mine\nrecompute 1\nlane 0 0: F:0 F:1 dW:1 dW:0\n"
    layers = [dataclasses.replace(layer, output_grad_s=0.0) for layer in TWO]
    with pytest.raises(ScheduleError, match="missing: dO:1 has costs and is not in the schedule"):
        tf_ooo.simulate(Schedule.from_text(text), layers)
    free = [dataclasses.replace(layer, forward_s=0.0) for layer in layers]
    curve = tf_ooo.simulate(Schedule.from_text(text), free).memory[0]
    assert (curve.alive_bytes.tolist()[-1], curve.peak_bytes) == (0, 70)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("recompute", "line 4: malformed: expected 'recompute LAYER LAYER ...'"),
        ("recompute 1 x", "line 4: malformed"),
        ("recompute 1 0", "recompute names layers in their order, each once"),
        ("recompute 0 2", "recompute names layers in their order"),
        ("recompute 0\nrecompute 1", "line 5: duplicate 'recompute'"),
    ],
)
def test_lines_that_are_refused(line, message):
    text = (
        f"tf_ooo schedule v1\nmode pipeline\npolicy mine\n{line}\nstage 0: 0-1\nlane 0 0: F:0 dO:0 dW:0 U:0\n"
    )
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text)


def test_layers_that_there_are_not():
    schedule = dataclasses.replace(planned(schedule="gpipe"), stages=(), recompute=(8,))
    with pytest.raises(ScheduleError, match="recompute 8: there are 8 layers"):
        tf_ooo.simulate(schedule, DEEP)


@pytest.mark.parametrize("wrong", [{"recomputed_bytes": 41}, {"recomputed_s": 2.5}, {"recomputed_bytes": -1}])
def test_parts_that_are_more_than_the_whole(wrong):
    with pytest.raises(CostError, match=f"^layer 'first': {next(iter(wrong))}"):
        dataclasses.replace(FIRST, **wrong)


def test_cost_tables():
    """Written where they are not 0, so that files are as they were."""
    assert "recomputed" not in CostTable(TWO).to_json()
    again = CostTable(with_recomputed(TWO, (1,)))
    assert CostTable.from_json(again.to_json()) == again


def test_what_is_worth_it():
    """Seconds for each byte; what frees nothing is left out: it keeps only what it reads."""
    layers = (
        tf_ooo.LayerCosts(4.0, 1.0, 1.0, activation_bytes=8, output_bytes=5),
        tf_ooo.LayerCosts(1.0, 1.0, 1.0, activation_bytes=5, output_bytes=5),
        tf_ooo.LayerCosts(1.0, 1.0, 1.0, activation_bytes=9, output_bytes=5),
        tf_ooo.LayerCosts(1.0, 1.0, 1.0, activation_bytes=90, output_bytes=5, inputs=(0, 2)),
    )
    assert worth_it(Problem(layers)) == [3, 2, 0]
    assert planned(layers, recompute="all").recompute == (0, 2, 3)


def test_without_a_limit_nothing_runs_again():
    """Nor where the limit is kept anyway."""
    free = planned()
    assert planned(recompute="auto").recompute == ()
    limit = free.predicted_peak_bytes
    at = planned(recompute="auto", memory_limit_bytes=limit)
    assert (at.lanes, at.recompute) == (free.lanes, ())
    below = planned(recompute="auto", memory_limit_bytes=limit - 1)
    assert len(below.recompute) == 1
    assert below.predicted_peak_bytes < limit
    assert "recompute" not in free.to_text()


@pytest.mark.parametrize("schedule", schedules_of("pipeline"))
def test_auto_is_never_slower_than_none_or_all(schedule):
    """Under every limit: whatever one of them keeps it keeps, in as few seconds or fewer."""
    free = planned(schedule=schedule).predicted_peak_bytes
    for limit in range(free // 8, free, max(1, free // 8)):
        steps = {}
        for how in ("none", "all", "auto"):
            try:
                plan = planned(schedule=schedule, recompute=how, memory_limit_bytes=limit)
            except MemoryLimitError:
                steps[how] = float("inf")
                continue
            simulated = tf_ooo.simulate(plan, DEEP)
            assert max(simulated.peak_bytes) == plan.predicted_peak_bytes <= limit
            steps[how] = plan.predicted_step_s
        assert steps["auto"] <= min(steps["none"], steps["all"]) * (1 + 1e-9)


def test_the_fewest_seconds_of_all_sets_of_layers():
    """GPipe on two devices, each set of six layers by brute force: the limit is kept in as few seconds."""
    layers = [dataclasses.replace(layer, inputs=None) for layer in DEEP[:6]]
    stages = ["l0", "l3"]
    plain = tf_ooo.plan(layers=layers, schedule="gpipe", devices=2, microbatches=4, stages=stages)
    for limit in (200, 240, 280):
        best_s = float("inf")
        for chosen in itertools.chain.from_iterable(itertools.combinations(range(6), n) for n in range(7)):
            timeline = tf_ooo.simulate(dataclasses.replace(plain, recompute=chosen), layers)
            if max(timeline.peak_bytes) <= limit:
                best_s = min(best_s, timeline.makespan_s)
        ours = tf_ooo.plan(
            layers=layers, schedule="gpipe", devices=2, microbatches=4, stages=stages, recompute="auto",
            memory_limit_bytes=limit,
        )  # fmt: skip
        assert best_s < float("inf")
        assert tf_ooo.simulate(ours, layers).makespan_s <= 1.05 * best_s


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40), st.integers(0, 9)), min_size=4, max_size=7),
    st.floats(0.2, 1.0),
    st.sampled_from(["gpipe", "1f1b", "zb_h1", "modulo", "fast_forward"]),
)
def test_any_costs_under_any_limit(sizes, share, schedule):
    """The limit is kept at every instant, the text form says the same, no layer runs again for nothing."""
    layers = [
        tf_ooo.LayerCosts(s, 2 * s, s, 1.0, activation_bytes=a, output_bytes=o, weight_bytes=o)
        for s, a, o in sizes
    ]
    limit = max(1, int(share * planned(layers, schedule=schedule).predicted_peak_bytes))
    try:
        plan = planned(layers, schedule=schedule, recompute="auto", memory_limit_bytes=limit)
    except MemoryLimitError as error:
        if error.smallest_bytes > limit:
            return
        raise
    read = Schedule.from_text(plan.to_text())
    assert read == plan
    timeline = tf_ooo.simulate(read, layers)
    assert max(timeline.peak_bytes) == plan.predicted_peak_bytes <= limit
    assert all(saved_bytes(tuple(layers), number) > 0 for number in plan.recompute)


def test_other_modes():
    """Each layer is one on one device and on data parallel workers; LayerPipe has two halves of a dO."""
    free = tf_ooo.plan(layers=DEEP, schedule="in_order")
    limit = free.predicted_peak_bytes - 60
    again = tf_ooo.plan(layers=DEEP, schedule="in_order", memory_limit_bytes=limit, recompute="auto")
    assert again.recompute
    assert again.predicted_peak_bytes <= limit
    assert tf_ooo.simulate(again, DEEP).makespan_s > tf_ooo.simulate(free, DEEP).makespan_s
    for asked in ({"mode": "layerpipe"}, {"schedule": "pipedream"}):
        with pytest.raises(OptionsError, match="recompute='all' is not for mode='layerpipe'"):
            tf_ooo.plan(layers=DEEP, devices=2, recompute="all", **asked)
    with pytest.raises(OptionsError, match="recompute='some' is not accepted; accepted: 'auto', 'n"):
        tf_ooo.plan(layers=DEEP, recompute="some")


def test_splits_recompute_too():
    """Below what any schedule keeps otherwise."""
    asked = {"layers": DEEP, "devices": 2, "microbatches": 4, "splits": True}
    with pytest.raises(OptionsError, match="no division is possible: .*needs (\\d+) bytes") as raised:
        tf_ooo.plan(**asked, memory_limit_bytes=90)
    assert "at least" in str(raised.value)
    best = tf_ooo.plan(**asked, memory_limit_bytes=90, recompute="auto")
    assert best.recompute
    assert best.predicted_peak_bytes <= 90


def test_the_command(tmp_path):
    """The table and the notes tell how many layers, which, what it takes and what it saves."""
    costs, out = CostTable(DEEP).save(tmp_path / "c.json"), tmp_path / "s.txt"
    limit = planned().predicted_peak_bytes - 1
    ask = [
        "plan",
        str(costs),
        "--devices",
        "2",
        "--microbatches",
        "4",
        "--memory",
        str(limit),
        "--schedule",
        "1f1b",
    ]
    ran = CliRunner().invoke(main, [*ask, "--recompute", "auto", "--out", str(out)])
    assert ran.exit_code == 0, ran.stderr
    assert "recomputes 1 of 8 layers" in ran.output
    note = next(
        line for line in ran.output.split("\n") if line.startswith("note: 1f1b recomputes 1 of 8 layers")
    )
    assert f"instead of {limit + 1} bytes" in note
    schedule = Schedule.from_text(out.read_text())
    assert len(schedule.recompute) == 1
    (row,) = json.loads(CliRunner().invoke(main, [*ask, "--recompute", "auto", "--json"]).stdout)[
        "candidates"
    ]
    number = schedule.recompute[0]
    assert row["recomputed"] == [f"l{number}"]
    assert row["recomputed_s"] == 4 * DEEP[number].forward_s
    assert row["peak_bytes_without"] == limit + 1
    again = json.loads(CliRunner().invoke(main, ["simulate", str(out), str(costs), "--json"]).stdout)
    assert max(again["peak_bytes"]) == max(row["peak_bytes"])
    none = json.loads(CliRunner().invoke(main, [*ask, "--json"]).stdout)["candidates"][0]
    assert (none["recomputed"], none["recomputed_s"], none["peak_bytes_without"]) == ([], 0.0, None)
    said = tf_ooo.plan(layers=DEEP, devices=2, microbatches=4, schedule="1f1b", memory_limit_bytes=limit,
                       recompute="auto").assumptions  # fmt: skip
    assert any(line.startswith("1f1b recomputes 1 of 8 layers (l") for line in said)
