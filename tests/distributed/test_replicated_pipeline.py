"""Two ranks with a pipeline of two stages each, against one pipeline on the joint batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")

sys.path.insert(0, str(Path(__file__).parent))
import launch  # noqa: E402

SCRIPT = launch.HERE / "replicated_pipeline.py"


def replicas(folder, *arguments):
    output = launch.run_horovod(2, [SCRIPT, folder, "replica", *arguments], timeout_s=300)
    files = [folder / f"replica{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), "\n".join(output)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_replicas_are_one_pipeline_on_the_joint_batch(tmp_path):
    first, second = replicas(tmp_path, "zb_h1")
    output = launch.finish(
        launch.start([launch.environment()], [SCRIPT, tmp_path, "joint", "gpipe"]), timeout_s=300
    )
    assert (tmp_path / "jointNone.json").exists(), "\n".join(output)
    joint = json.loads((tmp_path / "jointNone.json").read_text())
    assert first["weights"] == second["weights"]
    assert first["stages"] == second["stages"]
    assert len(first["stages"]) == 2
    for mine, together in zip(first["weights"], joint["weights"], strict=True):
        assert np.abs(np.subtract(mine, together)).max() < 1e-5
    for name in ("loss", "accuracy"):
        assert first["logs"][name] == pytest.approx(joint["logs"][name], abs=1e-6)
    for one in (first, second):
        assert one["during"] == ["CPU:0", "CPU:1"]
        assert one["after"] == ["CPU:0"]


@pytest.mark.slow
def test_replicas_put_variables_back_when_a_callback_raises(tmp_path):
    for one in replicas(tmp_path, "1f1b", "raise"):
        assert one["stopped"]
        assert one["during"] == ["CPU:0", "CPU:1"]
        assert one["after"] == ["CPU:0"]
