"""MirroredStrategy: one graph holds all replicas, their gradients packed into one communication."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mirrored_fit.py")


@pytest.fixture(scope="module")
def result():
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_two_replicas_are_rewritten_and_keep_their_bits(result):
    assert result["equal"]
    assert len(result["layers"]) == 6  # three a replica
    assert result["added_edges"] > 0
    assert result["ops"]["comm"] >= 2
    assert result["ops"]["dO"] > 0


def test_the_memory_limit_holds_for_each_device(result):
    assert "batch_size=" in result["no batch size"]
    limited = result["limited"]
    assert sorted(device[-5:] for device in limited["each"]) == ["CPU:0", "CPU:1"]
    assert limited["predicted"] == max(limited["each"].values()) < limited["together"]
    assert result["exactly"]["predicted"] <= limited["predicted"]
    assert "at least" in result["too low"]
