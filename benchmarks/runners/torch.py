"""``torch.distributed.pipelining`` in turns with ours: as many processes in the same CPU groups.

Both are compared by efficiency: frameworks compute one model at different speeds.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import time
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.case import Case, Measured
from benchmarks.processes import BenchmarkError, command
from benchmarks.runners import workers
from tf_ooo.hosts.addresses import free_port

ANSWER, SERIAL = "answer", "serial"


def why_not(case: Case) -> str:
    """Say what is missing: torch, or what workers need."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: no comparison with torch.distributed.pipelining"
    return workers.why_not(case)


def run(case: Case) -> Measured:
    """Let all take turns, and add each one's efficiency: the serial step there through all devices' time."""
    measured, devices = workers.run(case), case.parameters["devices"]
    medians = {name: statistics.median(way.turns_s) for name, way in measured.ways.items()}
    serial = {True: f"torch {SERIAL}", False: "one device"}
    ways = {}
    for way in case.ways:
        alone_s = medians.get(serial["torch" in way.options])
        if way.name not in measured.ways:
            continue
        ran = measured.ways[way.name]
        efficiency = None if alone_s is None else alone_s / (devices * medians[way.name])
        ways[way.name] = replace(ran, about={**ran.about, "efficiency": efficiency, "serial_s": alone_s})
    return replace(measured, ways=ways)


def cut(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage: equal parts, the output layer with the last."""
    inner = layers - 1
    first, after = inner * stage // stages, inner * (stage + 1) // stages
    return range(first, layers if stage == stages - 1 else after)


@dataclass(frozen=True)
class Rank:
    """A rank is told this: the prefix of the CPU groups, which of how many it is, and where they meet."""

    group: str
    rank: int
    devices: int
    port: int
    microbatches: int
    schedules: list[str]


class Ranks:
    """The processes, one for each device."""

    def __init__(self, group: str, devices: int, microbatches: int, schedules: list[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        port, pipe = free_port(), subprocess.PIPE
        ranks = [Rank(group, rank, devices, port, microbatches, schedules) for rank in range(devices)]
        lines = [command("benchmarks.runners.torch_rank", rank) for rank in ranks]
        self._processes = [
            subprocess.Popen(line, env=environment, stdin=pipe, stdout=pipe, text=True) for line in lines
        ]
        self.version = [self._answered(process) for process in self._processes][0]

    def step_s(self, schedule: str) -> float:
        """Run one step; return its seconds, until the last rank has answered."""
        started_s = time.perf_counter()
        for process in self._processes:
            print(schedule, file=process.stdin, flush=True)
        for process in self._processes:
            self._answered(process)
        return time.perf_counter() - started_s

    def _answered(self, process: subprocess.Popen[str]) -> str:
        for line in process.stdout or ():
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        raise BenchmarkError(f"a rank of torch.distributed ended with {process.wait()}")

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()


class TorchSteps:
    """The steps of one schedule; their weights are not compared: other initial ones, other kernels."""

    predicted_s: float | None = None

    def __init__(self, ranks: Ranks, schedule: str) -> None:
        self._ranks, self._schedule, self.steps = ranks, schedule, 0

    def step_s(self) -> float:
        self.steps += 1
        return self._ranks.step_s(self._schedule)

    def about(self) -> dict[str, Any]:
        return {"schedule": self._schedule, "torch": self._ranks.version}

    def finish(self) -> None:
        """There is no Keras model."""
