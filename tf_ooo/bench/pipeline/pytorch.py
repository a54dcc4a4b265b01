"""``torch.distributed.pipelining`` beside ours: as many processes in the same CPU groups, in turns."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tf_ooo.bench.pipeline.rows import TORCH_SERIAL, TORCH_STAGES
from tf_ooo.bench.shared.processes import LineProcess, command
from tf_ooo.hosts.addresses import free_port

RANK = "tf_ooo.bench.pipeline.pytorch_rank"
# The first steps tell the ranks their shapes.
_WARM_UP = 3


def why_not(workload: str, devices: int) -> str:
    """Why it is left out; empty where it runs."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: no comparison with torch.distributed.pipelining"
    if workload != "feed_forward":
        return f"{workload}: compared with torch.distributed.pipelining is feed_forward only"
    return "" if devices > 1 else "torch.distributed.pipelining is compared on two devices and more"


def cut(layers: int, stages: int, stage: int) -> range:
    """The layers of a stage: equal parts, the output layer with the last."""
    inner = layers - 1
    first, after = inner * stage // stages, inner * (stage + 1) // stages
    return range(first, layers if stage == stages - 1 else after)


@dataclass(frozen=True)
class Rank:
    """What a rank is told: the prefix of the CPU groups, which of how many it is, and where they meet."""

    group: str
    rank: int
    devices: int
    port: int
    microbatches: int


class TorchRanks:
    """The processes, one for each device.  Their ``version`` is PyTorch's."""

    def __init__(self, group: str, devices: int, microbatches: int) -> None:
        port = free_port()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [Rank(group, rank, devices, port, microbatches) for rank in range(devices)]
        self._processes = [LineProcess(command(RANK, rank), environment) for rank in ranks]
        self.version: str = [process.answered() for process in self._processes][0]

    def started(self) -> dict[str, Callable[[], float]]:
        """Seconds of a step, by schedule, and of the whole model on one rank; all have run some."""
        runs = {name: partial(self.step_s, name) for name in (TORCH_SERIAL, *TORCH_STAGES)}
        for step_s in runs.values():
            for _ in range(_WARM_UP):
                step_s()
        return dict(runs)

    def step_s(self, name: str) -> float:
        """Seconds of one step, until the last rank has answered.  RuntimeError: one has ended."""
        started_s = time.perf_counter()
        for process in self._processes:
            process.tell(name)
        for process in self._processes:
            process.answered()
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
