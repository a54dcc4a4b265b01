"""Tests when auto begins to compare, and what it says if not: no fit gets longer by more than 5%."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.fit.timing import FEW, MOST, STEPS, Baseline, Budget
from tf_ooo.report.report import Report


def after(first, trace_s, step_s, most=100_000):
    """Runs executions until it is known what to do; returns how many."""
    for number in range(most):
        if first.begins or first.why_not:
            return number
        timed = first.untimed
        first.add((trace_s + step_s if number == 0 else step_s) if timed else None, number == 0 and timed)
    return most


def test_a_short_fit_says_why_stock_is_kept():
    first = Budget(executions=20)
    assert after(first, trace_s=19.0, step_s=0.9) == 4
    assert first.why_not == (
        "20 steps of 0.9 s are too few to pay for a comparison of about 25 s: about 570 would; compare=True "
        "compares"
    )


def test_a_long_fit_begins_after_four_steps():
    """25.3 s are 5% of 562 steps of 0.9 s."""
    first = Budget(executions=4 + 563)
    assert after(first, trace_s=19.0, step_s=0.9) == 4
    assert first.begins
    first = Budget(executions=4 + 562)
    after(first, trace_s=19.0, step_s=0.9)
    assert not first.begins


def test_several_ways_are_traced_each():
    first = Budget(ways=4, executions=4 + 563)
    after(first, trace_s=19.0, step_s=0.9)
    assert "about 82 s" in first.why_not


def test_what_a_comparison_takes_beside_steps_counts():
    first = Budget(executions=4 + 563, beside_s=0.1)
    after(first, trace_s=19.0, step_s=0.9)
    assert not first.begins
    first = Budget(executions=4 + 566, beside_s=0.1)
    after(first, trace_s=19.0, step_s=0.9)
    assert first.begins


def test_steps_are_timed_also_where_nothing_ever_pays():
    first = Budget(executions=10**6, together=4, why_not="never")
    for seconds in (9.0, 0.8, 0.4, 0.4):
        assert first.untimed
        first.add(seconds, traced=seconds > 1)
    assert not first.untimed
    assert first.steps_s == [0.2, 0.1, 0.1]
    assert (first.begins, first.why_not) == (False, "never")


def test_where_nobody_knows_the_steps_that_ran_must_pay():
    first = Budget()
    assert first.waits == "stock steps run first"
    assert after(first, trace_s=1.0, step_s=0.1) == 340  # 1.7 s are 5% of 34 s
    assert first.begins


def test_what_is_waited_for_is_said():
    first = Budget(together=2)
    for seconds in (1.1, 0.1, 0.1, 0.1):
        first.add(seconds, traced=seconds > 1)
    assert "about 1.7 s begins after 680" in first.waits


def test_a_fit_that_ends_before_anything_is_timed():
    first = Budget(executions=1, together=3)
    first.add(2.0, traced=True)
    assert first.why_not == "3 steps are too few to pay for a comparison; compare=True compares"


def test_executions_of_several_steps_are_told_as_steps():
    first = Budget(executions=5, together=4)
    after(first, trace_s=1.0, step_s=0.8)
    assert first.why_not.startswith("20 steps of 0.2 s are too few")


def test_a_fit_whose_step_was_traced_before_knows_what_that_took():
    first = Budget(executions=30, trace_s=8.0)
    for _ in range(3):
        first.add(0.1, traced=False)
    assert "about 8.6 s" in first.why_not


def measured(steps, **more):
    """Return whether a baseline is measured, whose step takes 1 s and 13 s to be traced: 20 s altogether."""
    assert STEPS == 6
    report = Report()
    baseline = Baseline("one device", report, None, steps)
    seconds = baseline.measured(lambda least: [1.0] * least, 1.0, 13.0, **more)
    assert bool(seconds) is (report.no_baseline == "") is not baseline.too_short
    return bool(seconds)


def test_tracing_a_baseline_counts_as_its_steps_do():
    assert not measured(399)
    assert measured(400)


@pytest.mark.parametrize(("trace_s", "count"), [(13.0, FEW), (80.0, 8), (900.0, 30)])
def test_a_fit_that_does_not_pay_gets_steps_that_add_little_to_their_trace(trace_s, count):
    for asked, always, measured in ((None, True, count), (None, False, 0), (False, True, 0)):
        baseline = Baseline("one device", Report(), asked, 20, always)
        assert len(baseline.measured(lambda least: [1.0] * least, 1.0, trace_s)) == measured


def test_the_fit_that_pays_is_as_long_as_its_own_steps_take():
    """Four devices are to be four times as fast: 400 steps take 100 s, of which 20 s are more than 5%."""
    assert not measured(400, ours_s=0.25)
    assert measured(1600, ours_s=0.25)


@given(st.integers(1, 5), st.integers(1, 3000) | st.none(), st.floats(0.0, 50.0), st.floats(1e-3, 2.0))
def test_no_fit_is_made_longer_by_more_than_5_percent(ways, executions, trace_s, step_s):
    """By what it expects: a comparison costs at most that share of the fit, or of what ran before it."""
    first = Budget(ways, executions)
    ran = after(first, trace_s, step_s)
    if first.begins:
        whole_s = trace_s + step_s * (ran if executions is None else executions)
        assert ways * trace_s + 7 * step_s <= MOST * whole_s * (1 + 1e-9)
