"""One warning where less is faster, and what it says would be better."""

from __future__ import annotations

import dataclasses
import logging
import types

import pytest

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError
from tf_ooo.modes.data_parallel import planning as of_ranks
from tf_ooo.modes.data_parallel.planning import note_alone
from tf_ooo.modes.layerpipe.planning import advice as of_layerpipe
from tf_ooo.modes.layerpipe.planning import make_plan
from tf_ooo.modes.layerpipe.reporting import limits_of
from tf_ooo.modes.pipeline.reporting import why_back
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report.parts import SlowerWarning
from tf_ooo.report.report import Report
from tf_ooo.report.summary import Gain


def gain(ours_s, baseline_s):
    return Gain("one device", [baseline_s] * 6, [ours_s] * 6)


def layers(count=6, **more):
    return [
        LayerCosts(1e-3, 1e-3, 1e-3, weight_bytes=10**6, output_bytes=10**5, name=f"layer{n}", **more)
        for n in range(count)
    ]


def test_it_is_said_once_and_taken_back(caplog):
    caplog.set_level(logging.WARNING, "tf_ooo")
    report, slower_warning = Report(), SlowerWarning()
    slower_warning.advise = lambda gain: f"{gain.text}; take one"
    slower_warning.look(report, None)
    slower_warning.look(report, gain(0.5, 1.0))
    assert not report.notes
    for _ in range(2):
        slower_warning.look(report, gain(2.0, 1.0))
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("slower than one device: 2.00 s a step instead of 1.00 s")
    assert warning.endswith("; take one")
    assert report.notes == ["slower than one device; take one"]  # the first line has the times of now
    slower_warning.look(report, gain(1.0, 1.0))
    assert not report.notes


def test_the_first_steps_tell_a_loss_where_nothing_was_compared():
    """Not a gain: they were micro-batches on one device, and whole batches may be faster."""
    report = Report(mode="pipeline", no_baseline="too short", planned=Schedule("pipeline", "gpipe"))
    report.change(first_steps_s=[0.02, 0.021], steps_s=[0.05] * 40)
    assert report.gain is None
    assert report.gain_over_first.slower
    said = "slower than one device: 50.00 ms a step instead of 20.50 ms (2 + 40 steps, not in turns, 95% "
    assert report.headline.startswith(said)
    assert report.headline.endswith("); not compared with what Keras takes: too short")
    assert report.mood == "back"
    assert why_back(report).startswith("measured: slower than one device: 50.00 ms")
    report.change(steps_s=[0.01] * 40)
    assert report.headline == "10.00 ms a step (40 steps); not compared: too short"
    assert ("one device", "20.50 ms a step (2 at the start)") in report.rows()
    assert report.mood == "plain"
    assert not why_back(report)
    report.change(baselines_s={"one device": [0.02] * 6})
    assert report.gain_over_first is None


class TestRanks:
    def test_larger_batches_send_as_much(self):
        """One batch takes 10 ms alone, and 20 ms more to be averaged: 4 times the rows take 60 ms."""
        step_s = of_ranks.from_times(2, 0.010, 0.030)
        assert [step_s(2, rows) for rows in (1, 4, 8)] == pytest.approx([0.030, 0.060, 0.100])
        said = of_ranks.advice(2, 0.010, step_s, gain(0.030, 0.020))
        assert said.endswith("; by simulation 2 ranks with batches of 8 times as many rows reach 1.60x the "
                             "throughput of one")  # fmt: skip

    def test_of_a_ring_each_rank_sends_more_the_more_there_are(self):
        """A half of all bytes at two ranks, three quarters at four."""
        step_s = of_ranks.from_times(4, 0.010, 0.040)
        assert step_s(2, 1) == pytest.approx(0.030)

    def test_nothing_helps(self):
        step_s = of_ranks.from_times(2, 0.010, 10.0)
        said = of_ranks.advice(2, 0.010, step_s, gain(10.0, 0.020))
        assert said.endswith("; one rank alone is faster than all that was simulated: python train.py")

    def test_measured_costs_are_made_to_fit_and_simulated(self):
        """18 ms of work by costs, 9 ms measured; the link is as slow as the step of both ranks says."""
        step_s = of_ranks.from_costs(layers(), Link(1e-4, 1e9), 0.009, 0.030, 2, 1)
        assert step_s(2, 1) == pytest.approx(0.030, rel=1e-3)
        assert 0.030 < step_s(2, 4) < 0.030 + 3 * 0.009

    @pytest.mark.parametrize("costs", [None, CostTable(tuple(layers()), link=Link(1e-4, 1e9))])
    def test_rank_0_says_it(self, costs, caplog):
        caplog.set_level(logging.WARNING, "tf_ooo")
        for rank in (1, 0):
            ranks = types.SimpleNamespace(engine=types.SimpleNamespace(size=2, rank=rank))
            report = Report("data_parallel", ranks=2, steps_s=[0.030] * 6, costs=costs)
            note_alone(report, [0.010] * 6, ranks)
            assert bool(report.notes) is (rank == 0)
        assert len(caplog.records) == 1
        assert "slower than one rank with all 2 batches" in report.notes[0]
        assert "by simulation 2 ranks with batches of 8 times as many rows" in report.notes[0]


class TestLayerPipe:
    def test_fewer_devices_larger_batches_or_one_device(self):
        def step_s(asked, count):
            """Each further device costs 5 ms, whatever the rows."""
            if count > 3:
                raise OptionsError("too few layers")
            return 0.005 * (count - 1) + sum(layer.busy_s for layer in asked) / count

        said = of_layerpipe(layers(), 4, 0.020, step_s, gain(0.020, 0.018))
        assert "; by simulation devices=3, batches of 4 times as many rows takes 8.50 ms for each" in said
        said = of_layerpipe(layers(), 4, 0.020, step_s, gain(0.200, 0.018))
        assert said.endswith("; one device (mode='single_device') is faster than all that was simulated")

    def test_what_limits_a_plan(self):
        """Six equal layers on two devices: nobody waits; a link that takes 10 ms a message is the step."""
        table = CostTable(tuple(layers()))
        said = limits_of(make_plan("pipedream", table.layers, Link(), 2, 8), table)
        assert said == [
            "devices that wait 0%",
            "link 0%",
            "the largest layer, layer5, 33% of the step",
        ]
        slow = limits_of(make_plan("pipedream", table.layers, Link(0.0, 10**7), 2, 8), table)
        assert slow[1] != "link 0%"

    def test_devices_that_share_cores_limit_a_plan(self):
        """Each of the two devices could keep both cores busy: the step takes twice as long, nobody waits."""
        whole = [dataclasses.replace(layer, occupancy=(1.0, 1.0, 1.0)) for layer in layers()]
        table = CostTable(tuple(whole), Link(machines=(0, 0), cores=2))
        plan = make_plan("pipedream", table.layers, table.link, 2, 40)
        assert plan.timeline.steady_step_s == pytest.approx(sum(layer.busy_s for layer in whole))
        assert limits_of(plan, table)[1:3] == ["link 0%", "devices that share 2 cores 50%"]
        waiting = limits_of(plan, table)[0]
        assert int(waiting.removeprefix("devices that wait ").removesuffix("%")) <= 5
