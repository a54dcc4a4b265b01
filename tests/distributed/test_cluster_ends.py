"""A training process whose worker is lost shows its error, and is gone."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import launches
from tests.distributed.clusters import addresses, lose, workers

pytestmark = pytest.mark.takes(50)

# Once the error is shown, not counting what a busy machine takes.  TensorFlow and this package waited for the
# worker 10 to 25 s before.
END_S = 8.0
TRAIN = """
import sys
import numpy as np
import keras
import tf_ooo
from tf_ooo.hosts.cluster import connect

connect(sys.argv[1], silence_s=float(sys.argv[2]))
layers = [keras.layers.Dense(16, activation="tanh") for _ in range(4)]
model = keras.Sequential([keras.Input((9,)), *layers])
model.compile("adam", "mse", jit_compile=False)
show = sys.excepthook

def shown(*error):
    show(*error)
    print("shown", file=sys.stderr, flush=True)

sys.excepthook = shown
told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))
ours = tf_ooo.OOOBackprop(mode="pipeline", devices=sys.argv[1], microbatches=2, schedule="1f1b")
model.fit(np.ones((64, 9)), np.ones((64, 16)), batch_size=16, epochs=10**6, verbose=0, callbacks=[ours, told])
"""


def waiting_s(process):
    """How long its main thread waits for something else than a core until the process ends."""
    began_s, busy_s = time.monotonic(), busy_seconds(process.pid)
    latest_s = busy_s
    while process.poll() is None and time.monotonic() - began_s < 300:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            latest_s = max(latest_s, busy_seconds(process.pid))
        time.sleep(0.02)
    return time.monotonic() - began_s - (latest_s - busy_s)


def busy_seconds(pid):
    """How long a main thread has run and has waited for a core."""
    return sum(map(int, Path(f"/proc/{pid}/schedstat").read_text().split()[:2])) / 1e9


@pytest.mark.parametrize(("how", "silence_s"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 3.0)])
def test_a_process_whose_worker_is_lost_ends_at_once(how, silence_s):
    cluster = addresses(2)
    command = [sys.executable, "-c", TRAIN, cluster, str(silence_s)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        workers(cluster, [1]) as started,
        subprocess.Popen(command, env=launches.script_environment(), **pipes) as training,
    ):
        said = []
        for line in training.stdout:
            said.append(line.strip())
            if line.startswith("epoch 3"):
                lose(started[1], how)
            if line.startswith("shown"):
                break
        try:
            assert waiting_s(training) < END_S
            assert training.returncode == 1
        finally:
            training.kill()
    errors = [line for line in said if line.startswith("tf_ooo.errors.BackendError: lost worker ")]
    assert len(errors) == 1, said
    assert f"{cluster.split(',')[1]} (task 1)" in errors[0]
