"""``torch.distributed.pipelining`` beside ours: as many processes in the same CPU groups, in turns."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tf_ooo.bench.pipeline.pytorch_rank import ANSWER, SERIAL, STAGES
from tf_ooo.bench.shared.command import seconds_of
from tf_ooo.errors import BackendError
from tf_ooo.hosts.addresses import free_port

MODE = "torch.distributed.pipelining"
_WARM_UP = 3


def why_not(workload: str, devices: int) -> str:
    """Why it is left out; empty where it runs."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: no comparison with torch.distributed.pipelining"
    if workload != "feed_forward":
        return f"{workload}: compared with torch.distributed.pipelining is feed_forward only"
    return "" if devices > 1 else "torch.distributed.pipelining is compared on two devices and more"


class TorchRun:
    """One schedule of theirs; ``step_s()`` as in :mod:`tf_ooo.bench.shared.runs`."""

    def __init__(self, ranks: TorchRanks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def start(self) -> None:
        """Runs some steps: the first ones tell the ranks their shapes."""
        for _ in range(_WARM_UP):
            self.step_s()

    def step_s(self) -> float:
        """Seconds of one step, until the last rank has answered."""
        started = time.perf_counter()
        self._ranks.all_do(self._name)
        return time.perf_counter() - started


class TorchRanks:
    """The processes, one for each device.

    Args:
        group: prefix of the CPU groups of :func:`tf_ooo.bench.shared.confine.shares`.
        devices: ranks.
        microbatches: of a batch.
    """

    def __init__(self, group: str, devices: int, microbatches: int) -> None:
        port = free_port()
        self._processes = [self._started(group, rank, devices, port, microbatches) for rank in range(devices)]
        self.version = [self._answer(process) for process in self._processes][0]

    def runs(self) -> dict[str, TorchRun]:
        """One for each schedule, and the whole model on one rank."""
        return {name: TorchRun(self, name) for name in (SERIAL, *STAGES)}

    def all_do(self, name: str) -> None:
        """One step on all ranks.  BackendError: one has ended."""
        for process in self._processes:
            assert process.stdin is not None  # for mypy: a pipe
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
        for process in self._processes:
            self._answer(process)

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
            process.wait()

    @staticmethod
    def _started(group: str, rank: int, devices: int, port: int, microbatches: int) -> Any:
        command = [sys.executable, "-m", "tf_ooo.bench.pipeline.pytorch_rank", "--group", group]
        command += ["--rank", str(rank), "--devices", str(devices), "--port", str(port)]
        command += ["--microbatches", str(microbatches)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    @staticmethod
    def _answer(process: Any) -> str:
        for line in process.stdout:
            if line.startswith(ANSWER):
                return str(line.removeprefix(ANSWER).strip())
        raise BackendError(f"a rank of torch.distributed.pipelining ended with code {process.wait()}")


def rows_of(found: Mapping[str, Any], workload: str, microbatches: int) -> list[dict[str, Any]]:
    """One row for each of their schedules, beside their own serial step and our fastest schedule."""
    times: Mapping[str, Sequence[float]] = found["times"]
    ours = min(found["schedules"], key=lambda name: statistics.median(times[name]))
    return [
        {
            "workload": workload,
            "mode": MODE,
            "schedule": name,
            "runs": found["torch"],
            "baseline": ours,
            "devices": found["devices"],
            "microbatches": microbatches,
            "cores": found["cores"],
            **seconds_of(times, name, ours, found["devices"], SERIAL),
        }
        for name in STAGES
        if name in times
    ]


def text_of(row: Mapping[str, Any]) -> str:
    """One line."""
    shape = f"{row['workload']} P={row['devices']} m={row['microbatches']}"
    return (
        f"{shape:28s} {row['schedule']:14s} {row['step_s'] * 1e3:6.0f} ms ({row['step_s_min'] * 1e3:.0f}-"
        f"{row['step_s_max'] * 1e3:.0f}), {row['speedup']:.2f}x {row['baseline']}, serial "
        f"{row['serial_s'] * 1e3:.0f}, efficiency {row['efficiency']:.2f} ({row['runs']})"
    )
