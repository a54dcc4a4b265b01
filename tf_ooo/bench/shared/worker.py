"""A worker of a benchmark: ``tf-ooo worker`` that also tells how much memory its tensors take.

SIGUSR1 makes it write ``{"peak": bytes, "current": bytes}`` of TensorFlow's CPU allocator to the file
that it was given, and count the peak anew from there.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import click

from tf_ooo.bench.shared.options import FILE

_DEVICE = "CPU:0"


@click.command()
@click.option("--cluster", required=True, help="Addresses of all tasks.")
@click.option("--task", type=int, required=True, help="Which of them this process is.")
@click.option("--memory", type=FILE, required=True, help="What SIGUSR1 makes it write.")
def main(cluster: str, task: int, memory: Path) -> None:
    """Serves a task until it is ended."""
    from tf_ooo.hosts.worker import LEAST_THREADS, serve  # noqa: PLC0415 - imports TensorFlow

    signal.signal(signal.SIGUSR1, lambda number, frame: _tell(memory))
    serve(cluster, task, LEAST_THREADS, 1, say=click.echo)


def _tell(path: Path) -> None:
    import tensorflow as tf

    # One allocator serves all of the process, also what runs for other processes.
    memory = tf.config.experimental.get_memory_info(_DEVICE)
    tf.config.experimental.reset_memory_stats(_DEVICE)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(memory))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
