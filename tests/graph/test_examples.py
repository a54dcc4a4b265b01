"""The examples and the README's code run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

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


def test_readme(capsys):
    """The code blocks of the README, with a model and data."""
    blocks = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((320, 4), "float32"), np.ones((320, 1), "float32")
    given = {
        "model": model, "x": x, "y": y, "loss_fn": keras.losses.MeanSquaredError(),
        "optimizer": keras.optimizers.SGD(0.1), "data": tf.data.Dataset.from_tensor_slices((x, y)).batch(32),
    }  # fmt: skip
    for block in blocks:
        exec(compile(block, "README.md", "exec"), given)
    out = capsys.readouterr().out
    assert out.count("moved ops") == 2
    assert "nothing has been rewritten" not in out
    assert given["train_step"].report.rewritten_graph is not None


@pytest.mark.slow
def test_pipeline_example(tmp_path):
    """With two worker processes of its own; it stops them."""
    command = [sys.executable, str(EXAMPLES / "04_pipeline.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    for task in range(2):
        assert f" on /job:worker/replica:0/task:{task}/device:CPU:0: " in run.stdout
    assert float(re.search(r"1000 other pairs: .* accuracy ([\d.]+)", run.stdout)[1]) > 0.95


@pytest.mark.slow
def test_layerpipe_example(tmp_path):
    """Late gradients end where synchronous ones do; a picture of both."""
    command = [sys.executable, str(EXAMPLES / "05_layerpipe.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    ends = re.findall(r"^(.*): test accuracy ([\d.]+)% after", run.stdout, re.MULTILINE)
    accuracy = {name: float(value) for name, value in ends}
    assert accuracy.keys() == {"synchronous", "LayerPipe, stash", "LayerPipe, ema"}
    # Of 540 test pictures no more than two.
    assert max(accuracy.values()) - min(accuracy.values()) < 0.5
    assert (tmp_path / "out/layerpipe/accuracy.png").stat().st_size > 10_000
