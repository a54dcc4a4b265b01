"""A row of ``tf-ooo bench prediction``: a real fit in processes of its own."""

from __future__ import annotations

import pytest

from tests import zoo
from tf_ooo.bench.prediction.command import row_of
from tf_ooo.bench.prediction.rows import PredictionRun, error_of, text_of

pytestmark = zoo.needs_keras_3


def test_a_pipeline_on_logical_devices():
    row = row_of(PredictionRun("mlp", 4, 2))
    assert row.get("failed") is None
    assert row["runs"] == "1f1b"
    assert (row["devices"], row["microbatches"], row["rows"]) == (2, 4, 4 * 192)
    assert len(row["step_s"]) >= 4
    assert row["error"] == pytest.approx(error_of(row["predicted_s"], row["step_s"]), rel=1e-3)
    assert 0 < row["step_s_min"] <= row["measured_s"] <= row["step_s_max"]
    assert "the prediction is" in row["said"]
    assert text_of(row).startswith("mlp          run 2  2 logical devices  1f1b")
