"""A worker of a benchmark: ``tf-ooo worker`` that also tells how much memory the tensors of a step take.

SIGUSR1 makes it write ``{"peak": bytes, "current": bytes}`` of TensorFlow's CPU allocator to the file
that it was given, and count the peak anew from there.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from tf_ooo.bench.shared.options import FILE
from tf_ooo.errors import BackendError

_DEVICE = "CPU:0"
_ANSWER_S = 20.0


@click.command()
@click.option("--cluster", required=True, help="Addresses of all tasks.")
@click.option("--task", type=int, required=True, help="Which of them this process is.")
@click.option("--memory", type=FILE, required=True, help="What SIGUSR1 makes it write.")
def main(cluster: str, task: int, memory: Path) -> None:
    """Serves a task until it is ended."""
    from tf_ooo.hosts.worker import LEAST_THREADS, serve  # imports TensorFlow

    signal.signal(signal.SIGUSR1, lambda number, frame: _tell(memory))
    # The network is insecure, but a namespace of its own.
    serve(cluster, task, LEAST_THREADS, 1, insecure_network=True, say=click.echo)


def _tell(path: Path) -> None:
    import tensorflow as tf

    # One allocator serves all of the process, also what runs for other processes.
    memory = tf.config.experimental.get_memory_info(_DEVICE)
    tf.config.experimental.reset_memory_stats(_DEVICE)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(memory))
    unfinished.rename(path)


def file_of(folder: str, task: int) -> Path:
    """Where a worker writes what it is asked for."""
    return Path(folder) / f"memory_{task}.json"


def step_bytes(processes: Sequence[int], folder: str, step: Callable[[], object]) -> list[int]:
    """The most that each worker had allocated while ``step`` ran, above what it had before.

    BackendError where one of the processes, by task, does not answer in the folder of their files.
    """
    before = now_bytes(processes, folder)
    step()
    after = now_bytes(processes, folder)
    return [max(0, y["peak"] - x["current"]) for x, y in zip(before, after, strict=True)]


def now_bytes(processes: Sequence[int], folder: str) -> list[dict[str, int]]:
    """What each worker has allocated (``current``), and the most since it was asked before (``peak``)."""
    return [_ask(process, file_of(folder, task)) for task, process in enumerate(processes)]


def _ask(process: int, path: Path) -> dict[str, int]:
    path.unlink(missing_ok=True)
    os.kill(process, signal.SIGUSR1)
    ended = time.monotonic() + _ANSWER_S
    while not path.exists():
        if time.monotonic() > ended:
            raise BackendError(f"worker process {process} does not say how much memory it has")
        time.sleep(0.02)
    said: dict[str, int] = json.loads(path.read_text())
    return said


if __name__ == "__main__":
    main()
