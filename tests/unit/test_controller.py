"""Tests what the controller keeps, and what it says, for given times."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tf_ooo.compat import nests
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.profile import OpProfile
from tf_ooo.costs.table import CostTable
from tf_ooo.fit import controller, timing
from tf_ooo.fit.comparison import REWRITTEN, Comparison, StepTimes
from tf_ooo.fit.controller import StepController
from tf_ooo.modes.by_name import Options
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Task
from tf_ooo.report.parts import fall_back
from tf_ooo.report.report import Report
from tf_ooo.rewriting.request import Failures, StepSession


class Session(StepSession):
    """Stands for a rewrite that worked."""

    failures = Failures()


class Device:
    """Has done at once what it is asked for, and is done with it when somebody has waited; tells the time."""

    def __init__(self, monkeypatch):
        self.now_s, self.busy_s, self.ran = 0.0, {}, []
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        for module in (controller, timing):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(nests, "synchronize", self.wait_for)

    def step(self, name, *seconds):
        """A step whose calls take so long, the last of them also all further ones."""
        left = list(seconds)

        def step():
            self.ran.append(name)
            outputs = f"{name} {len(self.ran)}"
            self.busy_s[outputs] = left.pop(0) if len(left) > 1 else left[0]
            return outputs

        return step

    def wait_for(self, outputs):
        self.now_s += self.busy_s.pop(outputs)


@pytest.fixture(name="decide")
def _decide(monkeypatch):
    def decide(stock_s, rewritten_s, schedule="auto", compare=True):
        """Return what is kept where steps take so long, the last ones again and again until it is known."""
        device, report = Device(monkeypatch), Report()
        options = Options(schedule=schedule, profile_steps=len(stock_s), compare=compare)
        steps = device.step("stock", 0.0, *stock_s), device.step("ours", 0.0, *rewritten_s)  # they warm up
        step = StepController(*steps, Session(), options, report)
        while step.choice is None:
            step()
        return step.choice, report

    return decide


@pytest.mark.parametrize(
    ("stock_s", "rewritten_s", "kept", "steps"),
    [
        # Eight pairs are the least of which all say so by chance in less than a look's level: 1/2^8.
        ((10.0,), (9.0,), "rewritten", 2 + 2 * 8),
        # Six are the least that rule out a gain worth having.
        ((10.0,), (10.0,), "stock", 2 + 2 * 6),
        ((10.0,), (9.9,), "stock", 2 + 2 * 6),  # not worth having
        ((10.0,), (12.0,), "stock", 2 + 2 * 6),
        # 0.5 faster in the mean, and one pair in three says the opposite.
        ((10.0, 12.0, 8.0) * 6 + (8.0,), (9.5, 9.0, 9.6) * 6 + (9.6,), "stock", 40),
        ((10.0, 12.0, 8.0) * 6, (7.5, 7.0, 7.6) * 6, "rewritten", 2 + 2 * 8),
        ((10.0, 10.1, 9.9) * 6 + (9.9,), (9.0, 6.0, 12.0) * 6 + (12.0,), "stock", 40),
        ((10.0, 10.1, 90.0, 10.2), (9.0, 9.1, 70.0, 9.2), "rewritten", 2 + 2 * 8),  # slow ones in both
        # One that was interrupted is the one against 13: 110 of 2^14 sets of ranks have a sum of 14 or less.
        ((10.0, 10.1, 10.2, 10.3), (9.0, 9.1, 70.0, 9.2), "rewritten", 2 + 2 * 14),
    ],
)
def test_kept_only_if_it_is_sure_to_be_faster(decide, stock_s, rewritten_s, kept, steps):
    choice, report = decide(stock_s, rewritten_s)
    assert choice == kept
    assert report.fell_back == (kept == "stock")
    assert report.compared_steps == steps
    assert ("not sure to be faster after 40 steps" in report.fallback_reason) == (steps == 40)


def test_a_named_order_that_is_to_be_compared_is_compared_until_it_is_known(decide):
    """It stays whatever comes of it; without being asked ``profile_steps`` of each are timed."""
    choice, report = decide((10.0,), (12.0,), "fast_forward")
    assert (choice, report.fell_back, report.compared_steps) == ("rewritten", False, 2 + 2 * 6)
    assert report.headline.startswith("slower than the stock step")
    choice, report = decide((10.0,) * 3, (9.0,) * 3, "fast_forward", compare=None)
    assert (choice, report.compared_steps) == ("rewritten", 0)
    assert "(3 + 3 steps, 1.11x, too few for an interval)" in report.headline


def test_a_named_order_is_compared_by_what_there_was_where_the_fit_ends_before(monkeypatch):
    device, report = Device(monkeypatch), Report()
    options = Options(schedule="fast_forward", compare=True)
    step = StepController(device.step("stock", 1.0), device.step("ours", 0.5), Session(), options, report)
    for _ in range(10):
        step()
    assert step.choice is None
    assert report.headline.startswith("2.00x faster than the stock step")
    assert "(4 + 4 steps, 95% interval 2.00-2.00)" in report.headline


def test_the_headline_has_the_interval_that_decided(decide):
    """Steps in turns on a machine that slows down: each pair says 10%, single steps of both overlap."""
    stock_s = [1.0 + number for number in range(8)]
    report = decide(stock_s, [seconds / 1.1 for seconds in stock_s])[1]
    assert report.decided_interval == pytest.approx((1.1, 1.1))
    assert report.headline.startswith("1.10x faster than the stock step")
    assert report.gain.faster


def test_what_the_comparison_took_is_in_the_summary(decide):
    report = decide((10.0,), (9.0,))[1]
    assert "18 steps in turns, which all trained" in report.summary()


def test_noise_is_that_of_the_noisier(decide):
    report = decide((10.0, 12.0, 8.0), (1.0, 1.5, 9.0), schedule="in_order", compare=None)[1]
    assert report.step_noise_s == 2.0


def test_a_named_schedule_is_kept_however_slow(decide):
    assert decide((1.0,), (9.0,), schedule="in_order")[0] == "rewritten"


@pytest.mark.parametrize(("logged", "times"), list(zip((False, True), (1, 0), strict=True)))
def test_a_reason_is_logged_once(caplog, logged, times):
    report = Report()
    with caplog.at_level(logging.INFO, logger="tf_ooo"):
        fall_back(report, "the reason", logged=logged)
    assert sum("the reason" in record.message for record in caplog.records) == times
    assert report.fallback_reason == "the reason"


def test_timed_steps_alternate():
    times = StepTimes(2, stock_first=True)
    order = []
    for _ in range(6):
        assert not times.done
        which = times.next
        order.append((which, times.add(which, 1.0, traced=False)))
    assert times.done
    assert [which for which, _ in order] == ["stock", "rewritten"] * 3
    assert [timed for _, timed in order] == [False] * 2 + [True] * 4


def test_a_step_that_traced_is_no_sample():
    times = StepTimes(1, stock_first=False)
    for seconds, traced in ((9.0, True), (9.0, True), (9.0, True), (1.0, False), (2.0, False)):
        times.add(times.next, seconds, traced)
    assert times.done
    found = Comparison.of(times.seconds)
    assert (found.stock_s, found.rewritten_s) == (1.0, 2.0)
    assert times.progress == "2 of 2 steps timed"


def test_the_clock_is_read_when_the_outputs_are_there(monkeypatch):
    """A step returns before its device has computed it.  Warming up, here 9 s and 7 s, is no sample."""
    device, report = Device(monkeypatch), Report()
    steps = device.step("stock", 9.0, 3.0, 2.0), device.step("ours", 7.0, 1.0)
    step = StepController(*steps, Session(), Options(compare=True), report)
    while step.choice is None:
        step()
    assert device.ran == ["stock", "ours"] * 9
    assert not device.busy_s
    assert (report.stock_step_s, report.measured_step_s) == (2.0, 1.0)
    assert report.baselines_s["the stock step"] == [3.0] + [2.0] * 7
    assert step.choice == REWRITTEN


def test_the_first_rewritten_step_is_overhead(monkeypatch):
    """It traces and plans.  The stock step would have been traced anyway."""
    device, report = Device(monkeypatch), Report()
    steps = device.step("stock", 9.0, 2.0), device.step("ours", 7.0, 1.0)
    step = StepController(*steps, Session(), Options(compare=True), report)
    while step.choice is None:
        step()
    assert report.profiling_overhead_s == 7.0


def stock_first(monkeypatch, executions, seconds=(9.0, 2.0), never_pays="", **options):
    """A fit of so many executions, of which stock steps run first."""
    device, report = Device(monkeypatch), Report()
    steps = device.step("stock", *seconds), device.step("ours", 7.0, 1.0)
    step = StepController(*steps, Session(), Options(**options), report, never_pays=never_pays)
    step.begin_fit(executions, 1)
    return step, device, report


def test_a_fit_that_is_too_short_trains_in_stock_order_and_says_why(monkeypatch, caplog):
    step, device, report = stock_first(monkeypatch, 20)
    with caplog.at_level(logging.INFO, logger="tf_ooo"):
        for _ in range(20):
            step()
    assert device.ran == ["stock"] * 20
    reason = (
        "20 steps of 2 s are too few to pay for a comparison of about 14 s: about 140 would; compare=True "
        "compares"
    )
    assert report.fallback_reason == reason
    assert report.headline == f"no gain: the stock step runs: {reason}"
    assert [record.levelname for record in caplog.records if reason in record.message] == ["INFO"]


def test_what_stock_takes_is_known_without_a_comparison(monkeypatch):
    """Three steps are timed, also where it is clear before that nothing is compared; it is no verdict."""
    for never_pays in ("", "never"):
        step, device, report = stock_first(monkeypatch, 20, (2.0,), never_pays)
        for _ in range(20):
            step()
        assert (report.steps_s, report.stock_step_s) == ([2.0] * 3, 2.0)
        assert report.scalars()["step_s"] == 2.0
        assert len(device.busy_s) == 20 - 3
        assert (report.gain, report.measured_step_s) == (None, None)
        why = never_pays or "20 steps of 2 s are too few"
        assert report.headline.startswith(f"no gain: the stock step runs: {why}")
        assert dict(report.rows())["step, stock"] == "2.00 s"


def test_a_longer_fit_later_is_compared(monkeypatch):
    step, device, report = stock_first(monkeypatch, 20)
    for _ in range(20):
        step()
    step.begin_fit(1000, 1)
    assert not report.fell_back
    for _ in range(1000):
        step()
    assert device.ran[:23] == ["stock"] * 23
    assert device.ran[23:41] == ["stock", "ours"] * 9
    assert step.choice == REWRITTEN


def test_steps_are_not_waited_for_once_it_is_known_what_they_take(monkeypatch):
    step, device, _ = stock_first(monkeypatch, 20)
    for _ in range(20):
        step()
    assert len(device.busy_s) == 20 - 3


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        ({"compare": True}, ["stock", "ours"]),
        ({"compare": False}, ["stock", "stock"]),
        ({"profile_steps": 0}, ["ours", "ours"]),
        ({"strict": True}, ["ours", "stock"]),
        ({"memory_limit_bytes": 10**9}, ["ours", "stock"]),
        ({"schedule": "in_order"}, ["ours", "stock"]),
    ],
)
def test_what_is_asked_for_does_not_wait(monkeypatch, options, ran):
    step, device, _ = stock_first(monkeypatch, 2, **options)
    step()
    step()
    assert device.ran == ran


def test_the_profiler_is_overhead_too(monkeypatch):
    profile = OpProfile({"a": 1.0}, {"a": "MatMul"}, 1, 5.0, overhead_s=0.25)
    profiler = SimpleNamespace(profile=profile, run_anyway=lambda step, failed: step())
    monkeypatch.setattr(controller, "StepProfiler", lambda steps: profiler)
    costs = CostTable(
        [LayerCosts(1.0, 0.0, 2.0)], op_seconds={"a": 1.0, "b": 2.0}, notes=("b is calculated",)
    )
    monkeypatch.setattr(controller, "step_costs", lambda *arguments: costs)
    monkeypatch.setattr(controller, "tasks_of_ops", lambda graph: {"a": Task("dO", 1), "c": Task("dO", 0)})
    report = Report(profiling_overhead_s=7.0)
    result = SimpleNamespace(graph_def=None, training_graph=None, schedule=Schedule("single_device", "none"))
    assert controller.run_predicting(lambda: "outputs", report, result) == "outputs"
    assert (report.profiling_overhead_s, report.predicted_step_s) == (7.25, 3.0)
    assert report.notes == ["b is calculated"]
