"""``torch.distributed.pipelining`` in turns with ours: as many processes in the same CPU groups.

Both are compared by efficiency: frameworks compute one model at different speeds.
"""

import importlib.util
import os
import statistics
import subprocess
from dataclasses import replace

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
    measured, devices, ways = workers.run(case), case.parameters["devices"], {}
    medians = {name: statistics.median(way.turns_s) for name, way in measured.ways.items()}
    for name, ran in measured.ways.items():
        is_torchs = any("torch" in way.options for way in case.ways if way.name == name)
        alone_s = medians.get(f"torch {SERIAL}" if is_torchs else "one device")
        efficiency = None if alone_s is None else alone_s / (devices * medians[name])
        ways[name] = replace(ran, about={**ran.about, "efficiency": efficiency, "serial_s": alone_s})
    return replace(measured, ways=ways)


def cut(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage: equal parts, the output layer with the last."""
    inner = layers - 1
    first, after = inner * stage // stages, inner * (stage + 1) // stages
    return range(first, layers if stage == stages - 1 else after)


class Ranks:
    """The processes, one for each device."""

    def __init__(self, group: str, devices: int, microbatches: int, schedules: list[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        told, pipe, main = (devices, free_port(), microbatches, schedules), subprocess.PIPE, "torch_rank:main"
        lines = [command(f"benchmarks.runners.{main}", group, rank, *told) for rank in range(devices)]
        self._processes = [
            subprocess.Popen(line, env=environment, stdin=pipe, stdout=pipe, text=True) for line in lines
        ]
        self.version = [self._answered(process) for process in self._processes][0]

    def step(self, schedule: str) -> None:
        for process in self._processes:
            print(schedule, file=process.stdin, flush=True)
        for process in self._processes:
            self._answered(process)

    def _answered(self, process: subprocess.Popen[str]) -> str:
        for line in process.stdout or ():
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        raise BenchmarkError(f"a rank of torch.distributed ended with {process.wait()}")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
