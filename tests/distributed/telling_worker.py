"""A worker that also tells how much memory the tensors of a step take.

SIGUSR1 makes it write ``{"peak": bytes, "current": bytes}`` of TensorFlow's CPU allocator to the file
that it was given, and count the peak anew from there.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests import forked

_DEVICE = "CPU:0"
_ANSWER_S = 120.0


def serve(cluster, task, path):
    """Serves a task until it is ended."""
    from tf_ooo.hosts import worker  # imports TensorFlow

    forked.end_with_parent()
    signal.signal(signal.SIGUSR1, lambda number, frame: _tell(path))
    worker.serve(cluster, task, worker.LEAST_THREADS, 1, insecure_network=True, say=_say)


def _say(text):
    print(text, flush=True)


def _tell(path):
    import tensorflow as tf

    # One allocator serves all of the process, also what runs for other processes.
    memory = tf.config.experimental.get_memory_info(_DEVICE)
    tf.config.experimental.reset_memory_stats(_DEVICE)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(memory))
    unfinished.rename(path)


def file_of(folder, task):
    """Return the file into which a worker writes what it is asked for."""
    return Path(folder) / f"memory_{task}.json"


def now_bytes(processes, folder):
    """Return what each worker has allocated (``current``), and the most since last asked (``peak``)."""
    return [_ask(process, file_of(folder, task)) for task, process in enumerate(processes)]


def _ask(process, path):
    path.unlink(missing_ok=True)
    os.kill(process, signal.SIGUSR1)
    ended_s = time.monotonic() + _ANSWER_S
    while not path.exists():
        assert time.monotonic() < ended_s, f"worker process {process} does not say how much memory it has"
        time.sleep(0.02)
    return json.loads(path.read_text())
