"""Some of the paper's networks, built and measured as ``tf-ooo paper run`` does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tf_ooo.bench.paper import measured
from tf_ooo.bench.paper.measured import Asked, Effort, rows
from tf_ooo.bench.paper.networks import NETWORKS, PIPELINE, SINGLE
from tf_ooo.bench.shared import confine, scripts
from tf_ooo.bench.shared.scripts import ScriptNetwork
from tf_ooo.bench.shared.workloads import make

pytestmark = pytest.mark.takes(180)

EXAMPLES = Path(__file__).parents[2] / "examples/paper"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("feed_forward", {"width": 64}),
        ("bert12", {"task": "finetune", "layers": 1}),
        ("rnn16", {"layers": 3}),
    ],
)
def test_stock_and_rewritten_steps_end_with_the_same_bits(name, settings):
    (row,) = rows(Asked(NETWORKS[name], "tiny", "generated", EXAMPLES, settings), SINGLE)
    assert row["bit_equal"]
    assert row["losses"][1] < row["losses"][0]
    assert row["settings"].items() >= settings.items()
    assert row["data"].startswith("generated")


@pytest.mark.timeout(600)
def test_a_pipeline_is_measured_or_says_why_not(monkeypatch, capsys):
    monkeypatch.setitem(measured.EFFORTS, "tiny", Effort(2, 1, 1, 2, 2))
    settings = {"layers": 4, "width": 64, "batch": 8}
    of_schedules = rows(Asked(NETWORKS["feed_forward"], "tiny", "generated", EXAMPLES, settings), PIPELINE)
    reason = confine.why_not(with_link=False)
    if reason:
        assert not of_schedules
        assert f"skipped: {reason}" in capsys.readouterr().out
        return
    assert [row["schedule"] for row in of_schedules] == ["gpipe", "fast_forward", "modulo", "zb_h1"]
    for row in of_schedules:
        assert row["bit_equal"]
        assert (row["devices"], row["microbatches"], row["mode"]) == (2, 2, PIPELINE)
        assert row["planned_step_s"] > 0
        assert row["settings"].items() >= settings.items()


@pytest.mark.devices(2)
def test_data_are_prepared_where_the_model_is_not(monkeypatch):
    """The pipeline benchmark makes models on workers, whose share of the CPU is for training."""
    devices = []

    def data(of, rows, seed):
        devices.append(tf.identity(1.0).device)
        return np.zeros((rows, 3 * 4**2), "float32"), np.zeros(rows, "int32")

    of = ScriptNetwork(str(EXAMPLES / "feed_forward.py"), "tiny", "generated", {"layers": 1, "pixels": 4})
    monkeypatch.setattr(scripts.loaded(of.script), "data", data)
    with tf.device("CPU:1"):
        workload = make(of)
        devices.append(tf.identity(1.0).device)
    assert [device[-5:] for device in devices] == ["CPU:0", "CPU:1"]
    assert len(workload.x) == of.batch
