"""A worker of the pipeline benchmark: ``tf-ooo worker`` that also tells how much memory its tensors take.

SIGUSR1 makes it write ``{"peak": bytes, "current": bytes}`` of TensorFlow's CPU allocator to the file
that it was given, and count the peak anew from there.
"""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

_DEVICE = "CPU:0"


def main() -> None:
    """Serves a task until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--task", type=int, required=True)
    parser.add_argument("--memory", required=True, help="file")
    options = parser.parse_args()
    from tf_ooo.hosts.worker import LEAST_THREADS, serve  # noqa: PLC0415 - imports TensorFlow

    signal.signal(signal.SIGUSR1, lambda number, frame: _tell(Path(options.memory)))
    serve(options.cluster, options.task, LEAST_THREADS, 1, say=lambda text: print(text, flush=True))


def _tell(path: Path) -> None:
    import tensorflow as tf

    # One allocator serves all of the process, also what runs for other processes.
    found: dict[str, Any] = tf.config.experimental.get_memory_info(_DEVICE)
    tf.config.experimental.reset_memory_stats(_DEVICE)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
