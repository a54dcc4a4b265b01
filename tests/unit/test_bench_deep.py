"""The bench of deep models: its layers, their parts, and what a row says."""

from __future__ import annotations

import pytest

from tf_ooo.bench.planner.deep import divided_layers, measured, table, whole_layers
from tf_ooo.costs.layer_costs import Link


@pytest.mark.parametrize("devices", [4, 16, 64])
def test_parts_have_the_seconds_of_their_layers(devices):
    whole = whole_layers(48, 0)
    parts = divided_layers(whole, devices)
    for field in ("forward_s", "output_grad_s", "weight_grad_s", "update_s", "weight_bytes"):
        total = sum(getattr(layer, field) for layer in whole)
        assert sum(getattr(layer, field) for layer in parts) == pytest.approx(total)
    assert sum(layer.weight_grad_s > 0 for layer in parts) == 48
    assert all(1e-3 <= layer.forward_s <= 4e-3 for layer in whole)


def test_rows():
    row = measured("whole", 8, 1, 2, 4, Link())
    assert row["efficiency"] <= row["efficiency_bound"] <= 1
    assert row["efficiency"] == pytest.approx(row["serial_step_s"] / 2 / row["predicted_step_s"])
    assert row["schedule"] in row["efficiency_of"]
    refused = measured("whole", 8, 1, 16, 4, Link())
    assert "16 stages are more than the 8 layers" in refused["impossible"]
    assert len(table([row, refused]).splitlines()) == 3
