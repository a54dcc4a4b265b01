"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["01_keras_fit.py", "02_tf_function.py"])
def test_example(name, tmp_path):
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "moved ops" in run.stdout
    assert "nothing has been rewritten" not in run.stdout
