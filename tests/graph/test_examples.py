"""The examples run as they stand, one of them on forked workers; the code of pages: test_pages.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.distributed.clusters import addresses, workers

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

pytestmark = pytest.mark.takes(130)

EXAMPLES = Path(__file__).parents[2] / "examples"


def said_by(name, folder, *arguments):
    """Return what an example prints, run in that folder."""
    example = forked.start(forked.run_script, EXAMPLES / name, folder, *arguments)
    said, _ = example.communicate(timeout=800)
    assert example.returncode == 0, said
    return said


def assert_rewritten(said):
    assert "moved ops" in said
    assert "nothing has been rewritten" not in said


def test_keras_fit_example(tmp_path):
    said = said_by("01_keras_fit.py", tmp_path)
    assert_rewritten(said)
    assert re.search(r"auto is [\d.]+ times as fast as 1F1B, with the same bits", said)


def test_function_example(tmp_path):
    """In a new Python, as users run it."""
    command = [sys.executable, str(EXAMPLES / "02_tf_function.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=800, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert_rewritten(run.stdout)


def test_pipeline_example(tmp_path):
    """With two worker processes of its own; it stops them."""
    said = said_by("04_pipeline.py", tmp_path)
    for task in range(2):
        assert f" on /job:worker/replica:0/task:{task}/device:CPU:0: " in said
    assert float(re.search(r"1000 other pairs: .* accuracy ([\d.]+)", said)[1]) > 0.95


@pytest.fixture
def cluster():
    """Four workers that run already; those of the other examples start as a user's do."""
    cluster = addresses(4)
    with workers(cluster, range(4)):
        yield cluster


def test_an_example_that_is_larger_than_a_device(tmp_path):
    said = said_by("08_larger_than_a_device.py", tmp_path)
    assert "not compared: no device is to hold the whole model" in said
    limit = float(re.search(r"a worker: ([\d.]+) MB", said)[1])
    peaks = [float(peak) for peak in re.findall(r"at most ([\d.]+) MB by plan", said)]
    assert len(peaks) == 4
    assert max(peaks) < limit
    # There are 128 letters: untrained it is 4.9.
    assert float(re.search(r"loss afterwards, on the host: ([\d.]+)", said)[1]) < 4
    assert re.search(r"val_loss: [\d.]+", said)
    assert "all weights are sent" not in said


def test_an_example_of_a_mesh(tmp_path, cluster):
    """The replicas are asked for; what is compared depends on the machine."""
    said = said_by("09_mesh.py", tmp_path, "--replicas", "2", "--steps", "12", "--cluster", cluster)
    assert re.findall(r"replica (\d): .*task:(\d).*task:(\d)", said) == [("0", "0", "1"), ("1", "2", "3")]
    assert "the rewritten step runs" in said


def test_layerpipe_example(tmp_path):
    """Late gradients end where synchronous ones do; a picture of both."""
    said = said_by("05_layerpipe.py", tmp_path)
    ends = re.findall(r"^(.*): test accuracy ([\d.]+)% after", said, re.MULTILINE)
    accuracy = {name: float(value) for name, value in ends}
    assert accuracy.keys() == {"synchronous", "LayerPipe, stash", "LayerPipe, ema"}
    # Two of 540 test pictures are the most that may differ.
    assert max(accuracy.values()) - min(accuracy.values()) < 0.5
    assert (tmp_path / "out/layerpipe/accuracy.png").stat().st_size > 10_000
