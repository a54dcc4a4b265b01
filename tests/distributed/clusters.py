"""Worker processes and a client, for the tests of clusters."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tf_ooo.pipeline.addresses import free_port

HERE = Path(__file__).parent


def addresses(count):
    return ",".join(f"127.0.0.1:{free_port()}" for _ in range(count))


def start_worker(cluster, task, wait=True, **environment):
    command = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--task", str(task)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    if wait:
        line = process.stdout.readline()
        assert "is ready" in line, line + process.stderr.read()
    return process


@contextlib.contextmanager
def workers(cluster, tasks):
    """The processes by task; all are killed at the end."""
    started = {task: start_worker(cluster, task, wait=False) for task in tasks}
    try:
        for process in started.values():
            assert "is ready" in process.stdout.readline()
        yield started
    finally:
        for process in started.values():
            kill(process)


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.communicate()


def start_client(cluster, *what, script="cluster_client.py"):
    command = [sys.executable, str(HERE / script), cluster, *map(str, what)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )


def heard(client):
    """The client's next line."""
    line = client.stdout.readline()
    assert line, f"the client ended with {client.wait()}"
    return json.loads(line)
