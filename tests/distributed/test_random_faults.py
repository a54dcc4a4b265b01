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

from tests.faults.running import own_folder, run
from tests.faults.setups import FIRST, WORKER, Fault, Point, Setup, Training
from tests.forked import NEW_PYTHONS_PATH, ROOT
from tests.zoo import needs_keras_3

# Backups are Keras 3's.
pytestmark = [needs_keras_3, pytest.mark.takes(35)]
# One variant is enough: the trainings without a fault are three.
SETUPS = [
    Setup(57, Training("single", 2, "two_backups"), Fault("kill", FIRST, Point("saving", 3))),
    Setup(
        488,
        Training("single", 2, "weights"),
        Fault("file_limit", FIRST, Point("saving", 2), 0.0, 18666),
        True,
    ),
    Setup(494, Training("pipeline_workers", 2, "model"), Fault("kill", FIRST, Point("saving", 3)), True),
    Setup(540, Training("pipeline_workers", 2, "weights"), Fault("kill", WORKER, 0.455), True),
    Setup(74, Training("layerpipe", 2, "models"), Fault("exception", FIRST, Point("epoch_begin", 2)), True),
]


@pytest.fixture(scope="module")
def references():
    with own_folder() as folder:
        yield folder


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.number)
def test_ends_in_time_and_goes_on_to_the_same_bits(setup, references):
    outcome = run(setup, references)
    assert not outcome.failed, f"{outcome.kind}: {setup}\n{outcome.text}"
    assert outcome.kind != "not struck"


def test_ctrl_c_prints_what_has_run(tmp_path):
    table = tmp_path / "table.md"
    command = [sys.executable, "-m", "tests.faults", "--mode", "single", "--jobs", "1", "--table", str(table)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": NEW_PYTHONS_PATH}, cwd=ROOT, **pipes
    ) as faults:
        try:
            end = time.monotonic() + 200
            while not table.exists():
                assert faults.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            faults.send_signal(signal.SIGINT)
            said = faults.communicate(timeout=800)[0]
        finally:
            faults.kill()
    assert faults.returncode == 130, said
    assert "| all |" in said
