"""Real graphs, placement, order and messages; the tasks wait: logical devices of one process, or workers.

Here are the library with the op OooWait, its log, and the start of the processes; no TensorFlow is imported.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.case import Case, Measured
from benchmarks.processes import BenchmarkError, cluster_of, command, quiet, result_of

LOG, _MOST_S = "OOO_WAIT_LOG", 1800
_SOURCE = Path(__file__).parents[1] / "emulated" / "wait.c"
_BUILD = Path(__file__).parents[2] / "build"
# These are wait.c's.
_RECORDS, _HEAD_BYTES, NAME_BYTES = 1 << 16, 256, 168
RECORD = np.dtype(
    [("arrived", "f8"), ("start", "f8"), ("end", "f8"), ("device", "S64"), ("name", f"S{NAME_BYTES}")]
)


def why_not(case: Case) -> str:
    """Say why the op cannot be compiled here; return an empty text where it can."""
    return "" if shutil.which("cc") else "there is no C compiler (cc), which emulated devices need"


def run(case: Case) -> Measured:
    """Start the workers, if there are to be some, and the process that trains."""
    library()
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    count = case.parameters["devices"] if case.parameters["processes"] else 0
    line = functools.partial(command, "benchmarks.emulated.driver:serve_worker")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        environment = quiet() | {LOG: str(Path(folder) / "log")}
        with cluster_of(count, line, environment, folder) as (cluster, _):
            start = command("benchmarks.emulated.driver:measured", case, cluster)
            measured: Measured = result_of(start, environment, timeout_s=_MOST_S)
    return measured


def library() -> Path:
    """Compile the op, unless that was done for this very source, and return the library's file."""
    path = _BUILD / f"wait-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        start = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(unfinished), str(_SOURCE)]
        done = subprocess.run(start, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"the op does not compile:\n{done.stderr}")
        unfinished.rename(path)
    return path


class Log:
    """Read what waits have written into the file that all processes of a run map."""

    def __init__(self, path: str) -> None:
        mapped = np.memmap(path, np.uint8, "r+", shape=(_HEAD_BYTES + _RECORDS * RECORD.itemsize,))
        self._scale, self._next = mapped[:8].view(np.float64), mapped[8:16].view(np.uint64)
        self._records = mapped[_HEAD_BYTES:].view(RECORD)
        self._read = 0

    def wait(self, scale: float) -> None:
        """Have all tasks take so many times their seconds from now on; 0: none."""
        self._scale[0] = scale

    def new(self) -> np.ndarray:
        """Return what was written since this was called last."""
        first, self._read = self._read, int(self._next[0])
        return self._records[np.arange(first, self._read) % _RECORDS].copy()


def prefer() -> bool:
    """Let this process' threads go before others: what is emulated has its processor for itself.

    Waiting threads wake milliseconds late on a busy machine otherwise.  False: that is not allowed.
    """
    for thread in os.listdir("/proc/self/task"):
        try:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            return False
    return True
