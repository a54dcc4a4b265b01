"""``torch.distributed.pipelining`` in turns with ours: as many processes in the same CPU groups.

Both are compared by efficiency: frameworks compute one model at different speeds.
"""

import importlib.util
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import Case, Measured
from benchmarks.processes import Job, command, quiet
from benchmarks.runners import workers
from tf_ooo.hosts.devices import free_port

SERIAL = "serial"


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


def ranks(group: str, folder: str, devices: int, microbatches: int, schedules: list[str]) -> Job:
    """Start the processes, one for each device, which train by all these schedules."""
    address, port = Path(folder) / "torch", free_port()
    lines = [
        command(f"{__name__}_rank:main", group, str(address), rank, devices, port, microbatches, schedules)
        for rank in range(devices)
    ]
    job = Job(lines, quiet() | {"GLOO_SOCKET_IFNAME": "lo"}, address, devices)
    job.connect()
    return job
