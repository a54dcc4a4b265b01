"""Worker processes, each with a share of this machine's CPU, and a process that trains over them."""

import os
import tempfile
from dataclasses import dataclass

from benchmarks.cases import Case, Measured
from benchmarks.machine import confine
from benchmarks.processes import cluster_of, command, quiet, result_of, worker_line

# All workers together get so much of this machine: the rest is for what communicates, which on machines with
# GPUs takes nothing from those that compute.  With 0.9, messages slow the tasks down.
_SHARE = 0.6
# One thread within an op, and four ops side by side.
_THREADS = ("--intra-op-threads", "1", "--inter-op-threads", "4")


@dataclass(frozen=True)
class Workers:
    """The process that trains is told this."""

    cluster: str  # addresses, with commas
    processes: list[int]
    group: str  # folder of the CPU groups
    cores: float  # what each worker has of a core
    folder: str  # for files of this run


def why_not(case: Case) -> str:
    """Say what this machine lacks for shares of its CPU."""
    return confine.why_not(with_link=False)


def run(case: Case) -> Measured:
    """Run a case on ``devices`` workers; all ways are steps of one process, in turns."""
    devices, group = case.parameters["devices"], f"benchmarks_{os.getpid()}"
    cores = min(1.0, round(_SHARE * len(os.sched_getaffinity(0)) / devices, 2))
    with (
        tempfile.TemporaryDirectory() as folder,
        confine.Shares(group).made(devices, cores),
        cluster_of(devices, lambda *of: worker_line(*of, *_THREADS), quiet(), folder) as (cluster, processes),
    ):
        workers = Workers(cluster, processes, group, cores, folder)
        measured: Measured = result_of(command("benchmarks.runners.training:run", workers, case), quiet())
        return measured
