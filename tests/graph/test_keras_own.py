"""Keras' own tests of its trainer, with every training step in them rewritten."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.takes(30)

KERAS = importlib.util.find_spec("keras")
TRAINER_TEST = Path(KERAS.origin).parent / "src/trainers/trainer_test.py" if KERAS else Path()
ROOT = Path(__file__).parents[2]
CHOSEN = (
    "fit_flow", "val_split", "custom_train_step", "on_batch_methods", "recompile", "constraints", "loss_scal",
    "nested_inputs", "partial_loss", "multiple_compiles", "can_update_state", "raggeds", "loss_weights",
    "different_batch_size", "training_arg", "internal_only_loss", "compute_loss", "retracing",
    "data_adapter",
)  # fmt: skip
LEFT_OUT = ("torch", "eager", "grain", "jax", "evaluate", "predict")


@pytest.mark.slow
@pytest.mark.skipif(not TRAINER_TEST.exists(), reason="the installed Keras comes without its tests")
def test_trainer(tmp_path):
    chosen = f"({' or '.join(CHOSEN)}) and not ({' or '.join(LEFT_OUT)})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.keras_own.plugin",
               "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-W", "ignore", "-k", chosen,
               str(TRAINER_TEST)]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_OOO_KERAS_OWN": "rewritten",
    }
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=800)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    found = re.search(r"rewritten in (\d+) tests", run.stdout)
    assert found is not None
    assert int(found[1]) >= 10, run.stdout[-2000:]
