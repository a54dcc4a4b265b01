"""``torch.distributed.pipelining`` beside ours: as many processes in the same CPU groups, in turns."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time

from tf_ooo.bench.pipeline.messages import PipelineMeasured
from tf_ooo.bench.pipeline.pytorch_rank import SERIAL, STAGES, Rank
from tf_ooo.bench.pipeline.rows import shape_text
from tf_ooo.bench.shared.lines import LineProcess
from tf_ooo.bench.shared.processes import command
from tf_ooo.bench.shared.rows import Row, efficiency_of, seconds_of, spread_text
from tf_ooo.hosts.addresses import free_port

MODE = "torch.distributed.pipelining"
RANK = "tf_ooo.bench.pipeline.pytorch_rank"
_WARM_UP = 3


def why_not(workload: str, devices: int) -> str:
    """Why it is left out; empty where it runs."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: no comparison with torch.distributed.pipelining"
    if workload != "feed_forward":
        return f"{workload}: compared with torch.distributed.pipelining is feed_forward only"
    return "" if devices > 1 else "torch.distributed.pipelining is compared on two devices and more"


class TorchRun:
    """One schedule of theirs."""

    def __init__(self, ranks: TorchRanks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def step_s(self) -> float:
        """Seconds of one step, until the last rank has answered."""
        started_s = time.perf_counter()
        self._ranks.all_do(self._name)
        return time.perf_counter() - started_s


class TorchRanks:
    """The processes, one for each device.

    Args:
        group: prefix of the CPU groups of :func:`tf_ooo.bench.shared.confine.shares`.
        devices: ranks.
        microbatches: of a batch.

    Attributes:
        version: PyTorch's.
    """

    def __init__(self, group: str, devices: int, microbatches: int) -> None:
        port = free_port()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [Rank(group, rank, devices, port, microbatches) for rank in range(devices)]
        self._processes = [LineProcess(command(RANK, rank), environment) for rank in ranks]
        self.version = [process.answered() for process in self._processes][0]

    def started(self) -> dict[str, TorchRun]:
        """One run for each schedule, and the whole model on one rank.

        Each has made some steps: the first ones tell the ranks their shapes.
        """
        runs = {name: TorchRun(self, name) for name in (SERIAL, *STAGES)}
        for run in runs.values():
            for _ in range(_WARM_UP):
                run.step_s()
        return runs

    def all_do(self, name: str) -> None:
        """One step on all ranks.  RuntimeError: one has ended."""
        for process in self._processes:
            process.tell(name)
        for process in self._processes:
            process.answered()

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()


def rows_of(measured: PipelineMeasured, workload: str, microbatches: int) -> list[Row]:
    """One row for each of their schedules, beside their own serial step and our fastest schedule."""
    times, devices = measured["times"], measured["devices"]
    ours = min(measured["schedules"], key=lambda name: statistics.median(times[name]))
    return [
        {
            "workload": workload,
            "mode": MODE,
            "schedule": name,
            "runs": measured["torch"],
            "baseline": ours,
            "devices": devices,
            "microbatches": microbatches,
            "cores": measured["cores"],
            **seconds_of(times[name], times[ours]),
            **efficiency_of(times[name], times[SERIAL], devices),
        }
        for name in STAGES
        if name in times
    ]


def text_of(row: Row) -> str:
    """One line."""
    return (
        f"{shape_text(row)} {row['schedule']:14s} {spread_text(row)}, {row['speedup']:.2f}x "
        f"{row['baseline']}, serial {row['serial_s'] * 1e3:.0f}, efficiency {row['efficiency']:.2f} "
        f"({row['runs']})"
    )
