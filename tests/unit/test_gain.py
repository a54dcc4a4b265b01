"""Tests what a report says was gained: the first line, from single steps of both."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.modes.layerpipe.planning import make_plan as layerpipe_plan
from tf_ooo.modes.layerpipe.reporting import limits_of
from tf_ooo.modes.pipeline import reporting
from tf_ooo.modes.pipeline.mesh import counts_of, make_mesh
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import PlanRequest, make_plan
from tf_ooo.modes.pipeline.reporting import advice
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.pictures.page import chart_of
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.report.report import NOT_PREDICTED, Report
from tf_ooo.report.sections import LayerPipeSection, PipelineSection, device_text
from tf_ooo.report.summary import Gain

SECONDS = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=9)


def test_of_four_and_four_steps_the_interval_is_all_ratios():
    """Any further ratio at its end is left out by chance in more than 5 of 100 cases: 2 / C(8, 4)."""
    gain = Gain("stock Keras", (8.0, 8.4, 8.8, 9.6), (4.0, 4.2, 4.4, 4.8), in_turns=True)
    assert gain.interval == pytest.approx((8.0 / 4.8, 9.6 / 4.0))
    assert gain.ratio == pytest.approx(2.0)


def test_of_three_and_three_steps_nothing_is_sure():
    gain = Gain("stock Keras", (8.0, 8.1, 8.2), (1.0, 1.1, 1.2), in_turns=True)
    assert gain.interval is None
    assert not gain.faster
    assert gain.text == (
        "no sure gain over stock Keras: 1.10 s a step instead of 8.10 s "
        "(3 + 3 steps, 7.36x, too few for an interval)"
    )


@given(SECONDS, SECONDS)
def test_the_interval_holds_the_ratio_that_half_of_all_pairs_exceed(baseline_s, ours_s):
    gain = Gain("one device", baseline_s, ours_s, in_turns=True)
    assert not (gain.faster and gain.slower)
    if gain.interval is None:
        return
    low, high = gain.interval
    ratios = [theirs / our for theirs, our in itertools.product(baseline_s, ours_s)]
    assert low <= np.median(ratios) <= high
    turned = Gain("ours", ours_s, baseline_s, in_turns=True).interval
    assert turned == pytest.approx((1 / high, 1 / low))


def test_in_95_of_100_trials_the_interval_holds_the_truth():
    """Steps have a long tail, as on a machine that others use; 1,000 trials are 0.7 points wide."""
    draws = np.random.default_rng(5)
    trials, held = 1000, 0
    for _ in range(trials):
        baseline_s, ours_s = 1.25 * draws.lognormal(0, 0.3, 12), draws.lognormal(0, 0.3, 9)
        low, high = Gain("stock Keras", list(baseline_s), list(ours_s), in_turns=True).interval
        held += low <= 1.25 <= high
    assert 930 <= held <= 970


def test_steps_that_did_not_take_turns_are_about_as_fast_as_the_machine_was_then():
    """The baseline ran first; a machine that is 8% faster later is no gain, and one that moves says less."""
    later = Gain("one device", [0.0108, 0.0109, 0.0108, 0.011, 0.0109], [0.01, 0.0101] * 10)
    assert not later.faster
    assert later.text.startswith("no sure gain over one device: 10.05 ms a step instead of 10.90 ms (5 + 20")
    assert "steps, not in turns, 95% interval 0.98-1.20)" in later.text
    steady = Gain("one device", [0.016] * 5, [0.01, 0.0101] * 10)
    assert steady.text.startswith("about 1.59x faster than one device: ")
    assert steady.drift == pytest.approx(0.1)
    moving = Gain("one device", [0.016] * 5, [0.007] * 6 + [0.01] * 12 + [0.016] * 6)
    assert moving.drift == pytest.approx(0.6)
    assert not moving.faster
    elsewhere = Gain("one device", [0.054] * 6, [0.0024] * 60, elsewhere_s=0.0013)  # a burst of other work
    assert elsewhere.drift == pytest.approx(54 / 1.3 - 1)
    assert not elsewhere.faster
    alike = Gain("one device", [0.0024] * 6, [0.001] * 60, elsewhere_s=0.0013)  # within what differs anyway
    assert alike.drift == pytest.approx(0.1)
    assert Gain("one device", [0.016] * 5, [0.01] * 5, in_turns=True).text.startswith("1.60x faster")


@given(SECONDS, SECONDS)
def test_an_interval_without_turns_holds_that_of_turns(baseline_s, ours_s):
    apart, turns = (Gain("x", baseline_s, ours_s, None, in_turns).interval for in_turns in (False, True))
    assert (apart is None) == (turns is None)
    if apart is not None and turns is not None:
        assert apart[0] < turns[0] <= turns[1] < apart[1]


ALIKE = (9e-3, 8e-3, 9.5e-3, 8.5e-3)


@pytest.mark.parametrize(
    ("baseline_s", "ours_s", "begins"),
    [
        ((0.016, 0.0162, 0.0163, 0.0164), (0.013, 0.0131, 0.0132, 0.0133), "about 1.24x faster than one"),
        (
            (3.6e-3, 3.5e-3, 3.7e-3, 3.6e-3),
            (8.9e-3, 8.8e-3, 9e-3, 8.9e-3),
            "slower than one device: 8.90 ms a",
        ),
        (ALIKE, ALIKE, "no sure gain over one device: 8.75 ms a"),
    ],
)
def test_headlines(baseline_s, ours_s, begins):
    report = Report(mode="pipeline", baselines_s={"one device": list(baseline_s)}, steps_s=list(ours_s))
    assert report.headline.startswith(begins)
    assert f"{len(baseline_s)} + {len(ours_s)} steps" in report.headline
    assert report.summary().splitlines()[0] == report.headline == repr(report).splitlines()[0]
    assert report._repr_html_().startswith(f"<p><b>{report.headline}")


def test_headlines_without_a_gain():
    kept = Report(fell_back=True, fallback_reason="measured", baselines_s={"stock Keras": [2.0] * 4})
    kept.change(steps_s=[1.9, 2.0, 2.0, 2.1], in_turns=True)
    assert kept.headline == "no gain: stock kept (0.95-1.05x)"
    assert Report(fell_back=True, fallback_reason="it runs eagerly").headline == (
        "no gain: the stock step runs: it runs eagerly"
    )
    assert Report().headline == "no gain measured: nothing has been rewritten yet"
    short = Report(mode="pipeline", steps_s=[2e-3], no_baseline="the fit is too short")
    assert short.headline == "2.00 ms a step (1 steps); not compared: the fit is too short"


def test_a_report_that_loses_is_not_green(tmp_path):
    report = Report(mode="pipeline", planned=Schedule("pipeline", "gpipe", {(0, 0): (Task("F", 0),)}))
    report.change(baselines_s={"one device": [1.0] * 5}, steps_s=[2.0] * 5)
    assert report.mood == "back"
    assert 'class="state back"' in report.save_html(tmp_path / "report.html").read_text()
    report.change(steps_s=[0.5] * 5)
    assert report.mood == "good"


def predicted(**values):
    return dict(Report(predicted_step_s=0.0105, **values).rows()).get("predicted")


def test_the_prediction_shows_its_error():
    at, section = {"steps_s": [0.014] * 3}, PipelineSection(devices=["CPU:0"])
    low = "10.50 ms a step; measured 14.00 ms: the prediction is 25% too low"
    assert predicted(mode="pipeline", pipeline=section, **at) == low
    assert predicted(mode="layerpipe", layerpipe=LayerPipeSection(devices=["CPU:0"]), **at) == low
    assert predicted(mode="data_parallel", **at) == low
    high = predicted(mode="data_parallel", steps_s=[0.010])
    assert high == "10.50 ms a step; measured 10.00 ms: the prediction is 5% too high"
    assert predicted(mode="pipeline", pipeline=section) == "10.50 ms a step"
    assert dict(Report(mode="pipeline", pipeline=section, **at).rows()).get("predicted") is None


def test_where_stock_was_kept_the_prediction_is_beside_its_steps():
    kept = {"fell_back": True, "baselines_s": {"the stock order": [0.0125] * 3}, "steps_s": [0.014] * 3}
    text = "10.50 ms a step; measured 12.50 ms: the prediction is 16% too low"
    assert predicted(mode="data_parallel", **kept) == text


def test_on_one_device_it_is_said_what_the_prediction_is_of():
    """TensorFlow runs ops side by side there."""
    text = "10.50 ms a step, all ops one by one; measured 7.00 ms: the prediction is 50% too high"
    assert predicted(steps_s=[0.007]) == text


def test_ranks_beside_one_alone():
    report = Report(mode="data_parallel", steps_s=[0.014] * 3, alone_s=[0.012] * 5, ranks=2)
    text = "1.71x the throughput of one: 14.00 ms for 2 batches instead of 12.00 ms for one; "
    assert dict(report.rows())["2 ranks"] == text + "communication and waiting 14%"
    report.change(fell_back=True, baselines_s={"the stock order": [0.013] * 3})
    assert dict(report.rows())["2 ranks"].startswith("1.85x the throughput of one: 13.00 ms")


def test_ranks_that_are_compared_with_nothing_else_say_so_first():
    """One step an execution: there is no order to compare, but one rank alone."""
    report = Report(mode="data_parallel", steps_s=[0.014] * 5, alone_s=[0.012] * 6, ranks=2)
    report.change(fallback_reason="each execution is one step")
    assert report.headline == (
        "about 1.71x faster than one rank with all 2 batches: 14.00 ms a step instead of 24.00 ms "
        "(6 + 5 steps, not in turns, 95% interval 1.56-1.89)"
    )
    assert (report.mood, report.state) == ("good", "the stock order runs: each execution is one step")
    assert report.scalars()["speed_up"] == pytest.approx(24 / 14)
    report.change(alone_s=[0.005] * 6)
    assert report.headline.startswith(
        "slower than one rank with all 2 batches: 14.00 ms a step instead of 10"
    )
    assert report.mood == "back"
    report.change(fell_back=True, baselines_s={"the stock order": [0.013] * 5})
    assert report.headline.endswith("; no gain: stock kept (0.84-1.02x)")


def test_why_there_are_no_costs():
    assert "first step after some of both orders were timed" in Report().summary()
    assert "XLA compiles shows kernels" in Report(way="early").why_no_costs
    assert "rank 0 measures them" in Report(mode="data_parallel").why_no_costs
    assert Report(mode="pipeline").why_no_costs == "the first steps of a fit measure them"
    failed = Report(notes=[NOT_PREDICTED + "another profiler runs"])
    assert failed.why_no_costs == "the step's time is not predicted: another profiler runs"
    assert not Report(costs=CostTable(tuple(uneven()))).why_no_costs


def test_a_report_of_a_large_graph_is_short_in_a_notebook_and_in_a_terminal():
    report = Report(rewritten_graph="x" * 10**6, notes=["<script>"] * 30)
    assert len(repr(report)) < 2000
    assert "<script>" not in report._repr_html_()


def uneven(count=6):
    names = [f"layer{i}" for i in range(count)]
    return [
        LayerCosts(1e-3 * (1 + i % 3), 1e-3, 2e-3, 1e-4, weight_bytes=100.0, activation_bytes=8.0, name=name)
        for i, name in enumerate(names)
    ]


def plan_of(wanted):
    layers = uneven()
    return make_plan(layers, units_of(len(layers), ()), wanted), layers


def test_reports_are_pickled_with_plan_and_timeline():
    plan, _ = plan_of(PlanRequest("zb_h1", 2, 4))
    report = Report(planned=plan.schedule, timeline=plan.timeline)
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again.planned == plan.schedule
        assert again.timeline.makespan_s == plan.timeline.makespan_s
        assert again.timeline.steady_step_s == plan.timeline.steady_step_s


def test_advice_names_fewer_devices_or_one():
    """A link that takes long: fewer devices; one that takes for ever: one device."""
    cases = ((12e-3, "by simulation devices=2, microbatches="), (10.0, "one device (mode='single_"))
    for latency_s, text in cases:
        wanted = PlanRequest("gpipe", 4, 4, Link(latency_s=latency_s))
        plan, layers = plan_of(wanted)
        gain = Gain("one device", [0.11] * 5, [plan.step_s] * 5)
        assert gain.slower
        units = units_of(len(layers), ())
        said = advice(plan, layers, units, wanted, False, gain)
        assert said.startswith("slower than one device: ")
        assert text in said
        if latency_s < 1:  # one process, whose devices may be replicas: they send nothing within a step
            assert "microbatches=8, replicas=4 takes" in advice(plan, layers, units, wanted, True, gain)


LINKS = Link(), Link(machines=(0,) * 4, cores=2), Link(speeds=(1.0, 2.0, 1.0, 1.0))


@pytest.mark.parametrize("occupancy", [None, (0.5, 0.6, 0.7)])
@pytest.mark.parametrize("link", LINKS)
def test_no_plan_is_simulated_to_take_less_than_there_is_to_compute(occupancy, link):
    layers = [LayerCosts(1.0 + i, 2.0, 1.5, 0.1, occupancy=occupancy) for i in range(6)]
    for devices, schedule in itertools.product((2, 4), ("gpipe", "zb_h1")):
        wanted = PlanRequest(schedule, devices, 4, link.among(range(devices)))
        mesh = make_mesh(layers, units_of(len(layers), ()), wanted, counts_of("auto", devices, 4))
        least_s = reporting._least_step_s(layers, 4, wanted.link, devices)
        assert 0.3 * mesh.step_s < least_s <= mesh.step_s * (1 + 1e-9)


def test_advice_simulates_nothing_that_cannot_be_faster(monkeypatch):
    monkeypatch.setattr(reporting, "make_mesh", lambda *_: pytest.fail("it cannot be faster than one device"))
    wanted = PlanRequest("gpipe", 4, 4)
    plan, layers = plan_of(wanted)
    gain = Gain("one device", [0.01 * plan.step_s] * 5, [plan.step_s] * 5)
    said = advice(plan, layers, units_of(len(layers), ()), wanted, True, gain)
    assert "one device (mode='single_device') is faster than any other split" in said


def test_device_text():
    assert device_text("/job:localhost/replica:0/task:0/device:CPU:1") == "CPU:1"
    assert device_text("/job:worker/replica:0/task:2/device:GPU:0") == "worker 2, GPU:0"
    assert device_text("GPU:3") == "GPU:3"


def test_what_notebooks_and_terminals_show_of_a_timeline_and_of_costs():
    schedule = Schedule("pipeline", "gpipe", {(0, 0): (Task("F", 0), Task("dO", 0), Task("dW", 0))})
    timeline = simulate(schedule, [LayerCosts(1.0, 1.0, 2.0)])
    assert repr(timeline) == "Timeline(gpipe, 1 devices, 1 x 3 tasks, makespan 4 s, bubble 0%)"
    assert timeline._repr_html_().count("<img ") == 1
    assert repr(CostTable((LayerCosts(1.0, 1.0, 2.0),) * 3)) == (
        "CostTable(3 layers, edited, F + dO + dW 12 s a micro-batch)"
    )


def test_a_bubble_is_planned_or_measured():
    schedule = Schedule("pipeline", "gpipe", {(0, 0): (Task("F", 0), Task("dO", 0), Task("dW", 0))})
    timeline = simulate(schedule, [LayerCosts(1.0, 1.0, 2.0)])
    report = Report(mode="pipeline", timeline=timeline, pipeline=PipelineSection(devices=["CPU:0"]))
    bubbles = [report.scalars()[f"bubble_{which}"] for which in ("planned", "measured")]
    assert bubbles[0] == 0.0
    assert np.isnan(bubbles[1])
    report.change(timeline=None, measured_timeline=timeline)
    bubbles = [report.scalars()[f"bubble_{which}"] for which in ("planned", "measured")]
    assert np.isnan(bubbles[0])
    assert bubbles[1] == 0.0


@pytest.mark.parametrize("mode", ["single_device", "data_parallel"])
def test_a_measured_bubble_is_there_in_every_mode(mode):
    schedule = Schedule("single_device", "in_order", {(0, 0): (Task("F", 0), Task("dO", 0), Task("dW", 0))})
    measured = Timeline(schedule, np.array([[0.0, 1.0, 3.0]]), np.array([[1.0, 2.0, 4.0]]))
    report = Report(mode=mode, measured_timeline=measured)
    assert report.scalars()["bubble_measured"] == pytest.approx(0.25)


@pytest.mark.parametrize("policy", ["pipedream", "layerpipe"])
def test_the_planned_bubble_of_late_gradients_is_that_of_repeated_steps(policy):
    """The same in History, on the page and among what limits the step; filling and emptying are left out."""
    layers = [LayerCosts(1.0 + 0.3 * i, 2.0 - 0.2 * i, 3.0 - 0.4 * i, weight_bytes=1) for i in range(5)]
    plan = layerpipe_plan(policy, layers, Link(), 3, 32)
    work_s = sum(layer.busy_s for layer in layers)
    expected = 1 - work_s / (3 * plan.timeline.steady_step_s)
    report = Report(mode="layerpipe", timeline=plan.timeline)
    assert report.scalars()["bubble_planned"] == pytest.approx(expected, abs=1e-6)
    assert plan.timeline.bubble_fraction > expected + 0.02
    assert limits_of(plan, CostTable(layers))[0] == f"devices that wait {expected:.0%}"
    facts = dict(chart_of(plan.timeline).facts)
    assert facts["devices idle in a micro-batch, once they repeat"] == [f"{expected:.2%}"]


def test_neither_green_nor_amber(tmp_path):
    report = Report(mode="pipeline", planned=Schedule("pipeline", "gpipe", {(0, 0): (Task("F", 0),)}))
    report.change(steps_s=[0.5] * 5, no_baseline="compare=False")
    assert report.mood == "plain"
    assert 'class="state plain"' in report.save_html(tmp_path / "report.html").read_text()


def test_a_plan_that_does_not_run_is_compared_with_nothing():
    section = PipelineSection(devices=["CPU:0"])
    report = Report(fell_back=True, predicted_step_s=0.0105, limits=["bubbles 12%"], pipeline=section)
    report.change(baselines_s={"one device": [0.01] * 5})
    rows = dict(report.rows())
    assert rows["predicted"].endswith("by the plan that does not run")
    assert "limited by" not in rows
