"""A fit over worker processes that goes on in another process: see cluster_resume.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.distributed.clusters import addresses, workers


@pytest.mark.slow
def test_late_gradients_go_on_in_another_process(tmp_path):
    """With the costs that were measured, and the link: the same plan, and the same weights in the end."""
    cluster, found = addresses(2), []
    for part in ("first", "second"):
        with workers(cluster, [0, 1]):
            command = [sys.executable, "-m", "tests.distributed.cluster_resume", cluster, str(tmp_path), part]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    one, other = found
    assert one["plan"] == other["plan"]
    assert one["link_s"] == other["link_s"] > 0
    assert other["distance"] < 1e-6
