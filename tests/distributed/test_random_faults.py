"""A few random faults: killed while saving, no space, a lost worker or client, an exception.

``make faults`` runs others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.drawing import drawn
from tests.faults.running import own_folder, run
from tests.forked import ROOT
from tests.zoo import needs_keras_3

# Backups are Keras 3's.
pytestmark = [needs_keras_3, pytest.mark.takes(35)]
# One variant is enough: the trainings without a fault are three.
NUMBERS = {57: "single", 488: "single", 494: "pipeline_workers", 540: "pipeline_workers", 74: "layerpipe"}


@pytest.fixture(scope="module")
def references():
    with own_folder() as folder:
        yield folder


@pytest.mark.parametrize("number", NUMBERS)
def test_ends_in_time_and_goes_on_to_the_same_bits(number, references):
    setup = drawn(number)
    assert setup.training.mode == NUMBERS[number]
    outcome = run(setup, references)
    assert not outcome.failed, f"{outcome.kind}: {setup}\n{outcome.text}"
    assert outcome.struck


def test_ctrl_c_prints_what_has_run(tmp_path):
    table = tmp_path / "table.md"
    command = [sys.executable, "-m", "tests.faults", "--mode", "single", "--jobs", "1", "--table", str(table)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, **pipes) as faults:
        try:
            end = time.monotonic() + 120
            while not table.exists():
                assert faults.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            faults.send_signal(signal.SIGINT)
            said = faults.communicate(timeout=60)[0]
        finally:
            faults.kill()
    assert faults.returncode == 130, said
    assert "| all |" in said
