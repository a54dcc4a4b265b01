"""The workers of a run as its driver, the process that trains, sees them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.drivers import Workers
from tf_ooo.costs.layer_costs import Link

Run = TypeVar("Run")


class ConfinedCluster:
    """Workers whose computing threads have their share of the CPU.

    This process has none, it only waits.

    Attributes:
        devices: full names, by task.
        link: between them, measured.
    """

    def __init__(self, workers: Workers) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        # The workers' executors take this number from here.
        tf.config.threading.set_inter_op_parallelism_threads(4)
        confine.leave_free(workers.group, os.getpid())
        from tf_ooo.hosts.cluster import connect  # noqa: PLC0415 - threads first

        self._workers = workers
        self.cluster = connect(workers.cluster)
        self._confine()
        self.devices: Sequence[str] = self.cluster.devices
        self.link = self.cluster.link or Link()

    def _confine(self) -> None:
        for rank, process in enumerate(self._workers.processes):
            confine.enter_computing(self._workers.group, rank, process)

    def turns(
        self, runs: Mapping[str, Run], times_s: Callable[[Run], Sequence[float]]
    ) -> dict[str, list[float]]:
        """The seconds of all, in turns; threads that have come since the start are confined before."""
        self._confine()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self._workers.repetitions):
            for name, run in runs.items():
                times[name] += times_s(run)
        return times


def write_and_end(workers: Workers, result: object) -> None:
    """Writes what the driver has measured, and ends the process: its cluster would keep it."""
    workers.out.write_text(json.dumps(result))
    os._exit(0)
