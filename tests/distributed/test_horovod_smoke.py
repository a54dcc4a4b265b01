from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")

SCRIPT = Path(__file__).with_name("horovod_average.py")


def test_two_processes_average_a_gradient():
    horovodrun = Path(sys.executable).with_name("horovodrun")
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PATH": f"{horovodrun.parent}{os.pathsep}{os.environ['PATH']}",
    }
    run = subprocess.run(
        [str(horovodrun), "--gloo", "-np", "2", sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rank 0 averaged" in run.stdout
    assert "rank 1 averaged" in run.stdout
