"""MirroredStrategy: one graph holds all replicas, their gradients packed into one communication."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("mirrored_fit.py")


def test_two_replicas_are_rewritten_and_keep_their_bits():
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["equal"]
    assert len(result["layers"]) == 6  # three a replica
    assert result["added_edges"] > 0
    assert result["ops"]["comm"] >= 2
    assert result["ops"]["dO"] > 0
