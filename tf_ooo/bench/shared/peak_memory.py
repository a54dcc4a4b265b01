"""Memory that the tensors of a step take in the workers, as TensorFlow's allocator counts it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tf_ooo.errors import BackendError

_ANSWER_S = 20.0


def file_of(folder: str, task: int) -> Path:
    """Where a worker writes what it is asked for."""
    return Path(folder) / f"memory_{task}.json"


def step_bytes(processes: Sequence[int], folder: str, step: Callable[[], object]) -> list[int]:
    """The most that each worker had allocated while ``step`` ran, above what it had before.

    Args:
        processes: ids of ``tf_ooo.bench.shared.worker`` processes, by task.
        folder: that of their files.

    Raises BackendError where one does not answer.
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
