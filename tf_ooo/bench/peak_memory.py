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
        processes: ids of ``tf_ooo.bench.pipeline_worker`` processes, by task.
        folder: that of their files.

    Raises BackendError where one does not answer.
    """
    before = [_ask(process, file_of(folder, task))["current"] for task, process in enumerate(processes)]
    step()
    peaks = [_ask(process, file_of(folder, task))["peak"] for task, process in enumerate(processes)]
    return [max(0, peak - start) for peak, start in zip(peaks, before, strict=True)]


def _ask(process: int, path: Path) -> dict[str, int]:
    path.unlink(missing_ok=True)
    os.kill(process, signal.SIGUSR1)
    ended = time.monotonic() + _ANSWER_S
    while not path.exists():
        if time.monotonic() > ended:
            raise BackendError(f"worker process {process} does not say how much memory it has")
        time.sleep(0.02)
    found: dict[str, int] = json.loads(path.read_text())
    return found
