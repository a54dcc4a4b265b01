"""What the controller keeps, and what it says, for given times."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tf_ooo.compat import nests
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.profile import OpProfile
from tf_ooo.costs.table import CostTable
from tf_ooo.fit import controller
from tf_ooo.fit.comparison import REWRITTEN, STOCK, Comparison, StepTimes
from tf_ooo.fit.controller import StepController
from tf_ooo.fit.reporting import fall_back
from tf_ooo.modes.by_name import Options
from tf_ooo.report.report import Report
from tf_ooo.rewriting.failures import Failures
from tf_ooo.rewriting.session import StepSession


class Session(StepSession):
    """Of a rewrite that worked."""

    failures = Failures()


def decide(stock_s, rewritten_s, schedule="auto"):
    report = Report()
    options = Options(schedule=schedule, profile_steps=len(stock_s))
    step = StepController(lambda: None, lambda: None, Session(), options, report)
    for both in ((0.0, 0.0), *zip(stock_s, rewritten_s, strict=True)):  # the first ones warm up
        for which, taken_s in zip((STOCK, REWRITTEN), both, strict=True):
            step.comparison.times.add(which, taken_s, traced=False)
    step._decide_if_ready()
    return step.choice, report


@pytest.mark.parametrize(
    ("stock_s", "rewritten_s", "kept"),
    [
        ((10.0, 10.0, 10.0), (9.0, 9.0, 9.0), "rewritten"),
        ((10.0, 10.0, 10.0), (10.0, 10.0, 10.0), "stock"),  # no gain: nothing to keep it for
        ((10.0, 12.0, 8.0), (9.5, 9.0, 9.6), "stock"),  # 0.5 faster, stock moves by 2
        ((10.0, 12.0, 8.0), (7.5, 7.0, 7.6), "rewritten"),  # 2.5 faster
        ((10.0, 10.1, 9.9), (9.0, 6.0, 12.0), "stock"),  # 1 faster, itself moves by 3
        ((10.0, 10.1, 90.0), (9.0, 9.1, 70.0), "rewritten"),  # one slow step in each does not count
        ((10.0,), (9.0,), "rewritten"),  # a single step shows no noise
    ],
)
def test_kept_only_if_faster_by_more_than_the_noise(stock_s, rewritten_s, kept):
    choice, report = decide(stock_s, rewritten_s)
    assert choice == kept
    assert report.fell_back == (kept == "stock")
    assert ("noise" in report.fallback_reason) == (kept == "stock")


def test_noise_is_that_of_the_noisier():
    assert decide((10.0, 12.0, 8.0), (1.0, 1.5, 9.0))[1].step_noise_s == 2.0


def test_a_named_schedule_is_kept_however_slow():
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


class Device:
    """Has done at once what it is asked for, and is done with it when somebody has waited; tells the time."""

    def __init__(self, monkeypatch):
        self.now_s, self.busy_s, self.ran = 0.0, {}, []
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(controller, "time", clock)
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


def test_the_clock_is_read_when_the_outputs_are_there(monkeypatch):
    """A step returns before its device has computed it.  Warming up, here 9 s and 7 s, is no sample."""
    device, report = Device(monkeypatch), Report()
    steps = device.step("stock", 9.0, 3.0, 2.0), device.step("ours", 7.0, 1.0)
    step = StepController(*steps, Session(), Options(profile_steps=2), report)
    while step.profiling:
        step()
    assert device.ran == ["stock", "ours"] * 3
    assert not device.busy_s
    assert (report.stock_step_s, report.measured_step_s) == (2.5, 1.0)
    assert step.choice == REWRITTEN


def test_the_first_rewritten_step_is_overhead(monkeypatch):
    """It traces and plans.  The stock step would have been traced anyway."""
    device, report = Device(monkeypatch), Report()
    steps = device.step("stock", 9.0, 2.0), device.step("ours", 7.0, 1.0)
    step = StepController(*steps, Session(), Options(profile_steps=1), report)
    while step.profiling:
        step()
    assert report.profiling_overhead_s == 7.0


def test_the_profiler_is_overhead_too(monkeypatch):
    profile = OpProfile({"a": 1.0}, {"a": "MatMul"}, 1, 5.0, overhead_s=0.25)
    profiler = SimpleNamespace(profile=profile, run_anyway=lambda step, failed: step())
    monkeypatch.setattr(controller, "StepProfiler", lambda steps: profiler)
    costs = CostTable(
        [LayerCosts(1.0, 0.0, 2.0)], op_seconds={"a": 1.0, "b": 2.0}, notes=("b is calculated",)
    )
    monkeypatch.setattr(controller, "step_costs", lambda *arguments: costs)
    report, result = Report(profiling_overhead_s=7.0), SimpleNamespace(graph_def=None, training_graph=None)
    assert controller.run_predicting(lambda: "outputs", report, result) == "outputs"
    assert (report.profiling_overhead_s, report.predicted_step_s) == (7.25, 3.0)
    assert report.notes == ["b is calculated"]
