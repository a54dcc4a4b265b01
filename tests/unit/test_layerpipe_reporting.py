"""What the report says about plans of ``mode="layerpipe"``."""

from __future__ import annotations

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.table import CostTable
from tf_ooo.layerpipe.reporting import _ways_bytes
from tf_ooo.layerpipe.stages import HIGH, Stages
from tf_ooo.report import Report

OF = {("F", 0): 0, ("dO", 0): 0, (HIGH, 0): 1, ("dW", 0): 0, ("F", 1): 1, ("dO", 1): 1, ("dW", 1): 1}


def test_both_processors_of_a_divided_output_gradient_keep_its_weights():
    costs = CostTable([LayerCosts(1.0, 1.0, 1.0, weight_bytes=10), LayerCosts(1.0, 1.0, 1.0, weight_bytes=7)])
    rows = [{"delay_steps": 2}, {"delay_steps": 0}]
    whole, divided = (_ways_bytes(rows, costs, Stages(2, OF, shares)) for shares in ({}, {0: (0.4, 1)}))
    assert whole == {"stash": 20, "ema": 10, "latest": 0}
    assert divided == {"stash": 40, "ema": 10, "latest": 0}


def test_the_summary_says_where_both_parts_of_an_output_gradient_are():
    report = Report(mode="layerpipe")
    on = {"F_processor": 0, "dO_processor": 0, "dW_processor": 0}
    report.layers = [{"name": "wide", **on, "dO_high_processor": 1, "delay_steps": 2}]
    report.layerpipe = {"devices": ["CPU:0", "CPU:1"]}
    assert "CPU:0: F wide, dO wide, dW wide" in report.summary()
    assert "CPU:1: dO wide" in report.summary()
