from __future__ import annotations

import json

import pytest

from tf_ooo.bench.planner import scale
from tf_ooo.bench.planner import zero_bubble as zb
from tf_ooo.bench.planner.published import load
from tf_ooo.cli import main

pytestmark = pytest.mark.takes(20)


@pytest.fixture(scope="module")
def zero_bubble():
    return list(zb.rows(load(zb.INPUTS), quick=True))


@pytest.mark.parametrize(
    ("model", "published"), [("1.5B", 1.229), ("6.2B", 1.234), ("14.6B", 1.293), ("28.3B", 1.303)]
)
def test_zb_2p_over_1f1b_is_within_5_percent_of_the_published_ratio(zero_bubble, model, published):
    rows = [row for row in zero_bubble if row["workload"] == f"gpt-{model}"]
    assert len(rows) == 4
    for row in rows:
        assert row["published_speedup"] == pytest.approx(published, abs=6e-4)
        assert row["deviation"] == pytest.approx(row["predicted_speedup"] / row["published_speedup"] - 1)
        if "bandwidth_bit_s" not in row:
            assert abs(row["deviation"]) < 0.05
    # The authors' ZB-2p is limited to twice 1F1B's memory.
    assert all(row["peak_bytes"] <= 2 * row["baseline_peak_bytes"] for row in rows)


def test_stage_costs_of_the_smallest_model():
    """1.5B: sbh = 1024 x 6 x 2304; F is sbh(24h + 4s) a layer; 2 layers at the ends, 3 between."""
    inputs = load(zb.INPUTS)
    stages = zb.stage_costs(inputs, inputs["models"][0], equal=False)
    forward = 1024 * 6 * 2304 * (24 * 2304 + 4 * 1024)
    assert [round(stage.forward_s * 156e12 / forward, 9) for stage in stages] == [2, *[3] * 6, 2]
    assert stages[0].output_grad_s / stages[0].weight_grad_s == pytest.approx((24 * 2304 + 8 * 1024) / 55296)


def test_zero_bubble_bench_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "rows.json"
    main(["bench", "planner", "zero-bubble", "--quick", "--json", str(path)], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "Assumptions:" in printed
    assert len(json.loads(path.read_text())) == 16


def test_scale_rows_meet_the_closed_form():
    row = scale.measure_apart((32, 64, 64))
    assert row["predicted_step_s"] == row["bound_s"] == 2 * (64 * 9 + 31 * 5)
    assert row["peak_bytes"] == 32 * 2 * (1 << 20)
    assert row["tasks"] == 32 * (3 * 64 + 1)


def test_exponent_of_growth():
    rows = [{"devices": n, "microbatches": n, "plan_s": 0.0, "simulate_s": float(n**3)} for n in (2, 4, 8)]
    assert scale.exponent(rows) == pytest.approx(1.5)


@pytest.mark.slow
def test_a_thousand_devices():
    """1,024 devices x 4,096 micro-batches x 2,048 layers on one core: under 8 GB; the bench says how long."""
    row = scale.measure_apart(scale.SIZES[-1])
    assert row["predicted_step_s"] == row["bound_s"]
    assert row["process_bytes"] < scale.LIMIT_BYTES
