from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("pipeline_fit.py")
ROOT = SCRIPT.parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def checks(devices, *names):
    command = [sys.executable, str(SCRIPT), str(devices), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENV)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_devices_all_schedules_the_same_bits():
    found = checks(2, "schedules")["schedules"]
    assert len(found) == 2
    for one in found.values():
        assert one["equal"]
        assert 0 < one["distance"] < 1e-5
        assert one["loss"] < 1e-5
        assert one["accuracy"]
        # Layers' ops are on both devices, and the variables are home again.
        assert set(one["ops"]) == {"CPU:0", "CPU:1"}
        assert all({"F", "dO", "dW", "U"} <= set(kinds) for kinds in one["ops"].values())
        assert one["back"] == ["CPU:0"]
        assert one["edges"] > 20
