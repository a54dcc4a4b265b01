"""Tests what the report says about plans of ``mode="layerpipe"``."""

from __future__ import annotations

import pytest

from grappler_passes.graph.training_graph import Layer, TrainingGraph
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.modes.layerpipe.planning import make_plan
from tf_ooo.modes.layerpipe.reporting import _ways_bytes, fill_report, placed_rows
from tf_ooo.modes.layerpipe.rounds import HIGH, Stages, stages_of
from tf_ooo.report.report import Report
from tf_ooo.report.sections import LayerPipeSection, LayerRow

OF = {("F", 0): 0, ("dO", 0): 0, (HIGH, 0): 1, ("dW", 0): 0, ("F", 1): 1, ("dO", 1): 1, ("dW", 1): 1}


def test_both_processors_of_a_divided_output_gradient_keep_its_weights():
    """The first of three processors keeps weights in 4 rounds, the second in 3, and is sent one of them."""
    costs = CostTable([LayerCosts(1.0, 1.0, 1.0, weight_bytes=10), LayerCosts(1.0, 1.0, 1.0, weight_bytes=7)])
    whole = {at: processor for at, processor in OF.items() if at[0] != HIGH}
    assert _ways_bytes(costs, Stages(2, whole, {})) == {"stash": 20, "ema": 10, "latest": 0}
    assert _ways_bytes(costs, Stages(3, whole, {})) == {"stash": 40 + 14, "ema": 17, "latest": 0}
    divided = Stages(3, OF, {0: (0.4, 1)})
    assert _ways_bytes(costs, divided) == {"stash": 40 + 20 + 14, "ema": 17, "latest": 0}


def test_weights_without_an_output_gradient_are_not_kept():
    costs = CostTable([LayerCosts(1.0, 0.0, 1.0, weight_bytes=10), LayerCosts(1.0, 1.0, 1.0, weight_bytes=7)])
    assert _ways_bytes(costs, Stages(2, OF, {})) == {"stash": 0, "ema": 0, "latest": 0}


def test_the_summary_says_where_both_parts_of_an_output_gradient_are():
    on = {"F_processor": 0, "dO_processor": 0, "dW_processor": 0}
    layers = [LayerRow(name="wide", **on, dO_high_processor=1, delay_steps=2)]
    report = Report("layerpipe", layers=layers, layerpipe=LayerPipeSection(["CPU:0", "CPU:1"]))
    assert (
        "CPU:0: forward pass and a part of the output gradient and weight gradient of wide"
        in report.summary()
    )
    assert "CPU:1: the rest of the output gradient of wide" in report.summary()


def test_only_divided_output_gradients_are_on_two_processors():
    """Where a part is left out, or is just what a layer's own dW needs, there is no second processor."""
    rows = [LayerRow(name="wide", dO_high_processor=1), LayerRow(name="last")]
    rows = placed_rows(rows, Stages(2, OF, {}))
    assert [row.get("dO_high_processor") for row in rows] == [None, None]
    rows = placed_rows(rows, Stages(2, OF, {0: (0.4, 1)}))
    assert [row.get("dO_high_processor") for row in rows] == [1, None]


def test_the_report_has_the_plans_seconds():
    """Steps follow one another as fast as the slower processor is; one processor needs the sum."""
    layers = [LayerCosts(1.0, 2.0, 3.0, update_s=0.5), LayerCosts(2.0, 1.0, 4.0, update_s=0.25)]
    plan = make_plan("pipedream", layers, Link(), 2, 16)
    whole = {at: processor for at, processor in OF.items() if at[0] != HIGH}
    report = Report(mode="layerpipe")
    graph = TrainingGraph({}, (Layer(0, ("v",)), Layer(1, ("w",))), ())
    fill_report(report, graph, plan, CostTable(layers), Stages(2, whole, {}), ["CPU:0", "CPU:1"])
    assert report.layerpipe["serial_step_s"] == 6.5 + 7.25
    assert report.layerpipe["predicted_step_s"] == pytest.approx(7.25)
    assert report.predicted_step_s == report.layerpipe["predicted_step_s"]
    assert [row["delay_steps"] for row in report.layers] == [2, 0]
    assert report.timeline is plan.timeline


def test_the_report_says_what_the_plan_takes_for_granted():
    """The report has the link, the cores and the speeds of devices."""
    link = Link(3e-5, machines=(0, 0), cores=2, speeds=(1.0, 0.5))
    layers = tuple(LayerCosts(1e-3, 1e-3, 1e-3, name=name) for name in ("a", "b"))
    costs, graph = CostTable(layers, link), TrainingGraph({}, (Layer(0, ("v",)), Layer(1, ("w",))), ())
    plan = make_plan("pipedream", layers, link, 2, 8)
    report = Report(mode="layerpipe")
    fill_report(report, graph, plan, costs, stages_of(plan.schedule, 2), ["CPU:0", "CPU:1"])
    said = report.summary()
    assert "0.03 ms each message; devices share the 2 cores of a machine" in said
    assert "CPU:1 (0.5 times as fast as where costs were measured): " in said
    assert report.layerpipe["link"]["cores"] == 2
