"""Compares what the planner predicts with what papers published, and makes the largest plan."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import planner
from benchmarks.planner import PROCESSORS, ZB_2P, ZB_V, flop_layers, layerpipe_gain
from benchmarks.report.tables import with_tables
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate

pytestmark = pytest.mark.takes(30)

# Seconds of F, dO and dW of a layer: whole numbers, so that the closed form is met to the last bit.
TASK_S = (3.0, 4.0, 2.0)
LARGEST, LIMIT_BYTES = (1024, 4096, 2048), 8e9


@pytest.mark.parametrize(("model", "published"), [*zip(ZB_2P, [1.229, 1.234, 1.293, 1.303], strict=True)])
@pytest.mark.parametrize("equal", [False, True])
def test_zb_2p_over_1f1b_is_within_5_percent_of_the_published_ratio(model, published, equal):
    assert model.published == pytest.approx(published, abs=6e-4)
    layers = model.stages(equal)
    gain = model.gain("zb_h2", layers, Link())
    assert abs(gain / published - 1) < 0.05
    ours, base = (model.timeline(name, layers, Link()) for name in ("zb_h2", "1f1b"))
    assert max(ours.peak_bytes) <= 2 * max(base.peak_bytes)  # which the authors' ZB-2p is limited to


@pytest.mark.parametrize("model", ZB_V[:2], ids=lambda model: model.name)
def test_zb_v_over_1f1b_is_within_5_percent_of_the_published_ratio(model):
    layers = [model.layer()] * (model.layers + 2)
    gain = model.gain("zb_v", layers, Link())
    assert abs(gain / model.published - 1) < 0.05
    ours, base = (model.timeline(name, layers, Link()) for name in ("zb_v", "1f1b"))
    assert max(ours.peak_bytes) <= max(base.peak_bytes) * (1 + 1e-9)


def test_stage_costs_of_the_smallest_model():
    """1.5B: sbh = 1024 x 6 x 2304; F is sbh(24h + 4s) a layer; 2 layers at the ends, 3 between."""
    stages = ZB_2P[0].stages(equal=False)
    forward = 1024 * 6 * 2304 * (24 * 2304 + 4 * 1024)
    assert [round(stage.forward_s * 156e12 / forward, 9) for stage in stages] == [2, *[3] * 6, 2]
    assert stages[0].output_grad_s / stages[0].weight_grad_s == pytest.approx((24 * 2304 + 8 * 1024) / 55296)


def test_layerpipe_over_pipedream():
    of_vgg16 = [layerpipe_gain(flop_layers("vgg16"), count) for count in PROCESSORS]
    assert fmean(of_vgg16) >= 1.25
    assert of_vgg16[PROCESSORS.index(8)] > 1.4
    assert layerpipe_gain(flop_layers("mlp"), 8) > 1.8


@pytest.mark.slow
def test_the_page_has_these_tables():
    """``python -m benchmarks planner`` makes them."""
    page = planner.PAGE.read_text()
    assert with_tables(page, planner.tables()) == page


def planned(devices, microbatches, layers):
    """ZB-H1's step, what it is known to be, and its peak."""
    costs = (LayerCosts(*TASK_S, activation_bytes=1 << 20, output_bytes=1 << 16),) * layers
    timeline = simulate(POLICIES["zb_h1"].make(Problem(costs, devices, microbatches)), costs)
    forward_s, output_grad_s, weight_grad_s = TASK_S
    bubble_s = (devices - 1) * (forward_s + output_grad_s - weight_grad_s)
    known_s = layers / devices * (microbatches * sum(TASK_S) + bubble_s)
    return timeline.makespan_s, known_s, max(timeline.peak_bytes)


def test_a_large_plan_meets_the_closed_form():
    step_s, known_s, peak_bytes = planned(32, 64, 64)
    assert step_s == known_s == 2 * (64 * 9 + 31 * 5)
    assert peak_bytes == 32 * 2 * (1 << 20)


@pytest.mark.slow
def test_a_thousand_devices():
    """1,024 devices x 4,096 micro-batches x 2,048 layers in a process of its own: under 8 GB."""
    root, module = Path(__file__).parents[2], f"tests.unit.{Path(__file__).stem}"
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    step_s, known_s, process_bytes = json.loads(done.stdout)
    assert step_s == known_s
    assert process_bytes < LIMIT_BYTES


if __name__ == "__main__":
    print(json.dumps([*planned(*LARGEST)[:2], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
