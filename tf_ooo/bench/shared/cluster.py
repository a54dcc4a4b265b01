"""The workers of a run as its driver, the process that trains, sees them, and what layers cost there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.drivers import Workers
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError
from tf_ooo.planning.model.schedule import Schedule


class ConfinedCluster:
    """Workers whose computing threads have their share of the CPU; this process only waits."""

    def __init__(self, workers: Workers) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        # The workers' executors take this number from here.
        tf.config.threading.set_inter_op_parallelism_threads(4)
        confine.leave_free(workers.group, os.getpid())
        from tf_ooo.hosts.cluster import connect  # threads first

        self._workers, self._cluster = workers, connect(workers.cluster)
        self._confine()
        self.devices: Sequence[str] = self._cluster.devices  # full names, by task
        self.link = self._cluster.link or Link()  # measured

    def _confine(self) -> list[int]:
        """How many threads of each worker have their share now."""
        processes = enumerate(self._workers.processes)
        return [confine.enter_computing(self._workers.group, rank, process) for rank, process in processes]

    def times_s(self, runs: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """What the runs return, in turns; threads that have come since the start are confined before.

        BackendError: no worker has any thread that TensorFlow computes with.
        """
        if not any(self._confine()):
            raise BackendError("no worker has a thread that computes, by its name, to give it its share")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self._workers.repetitions):
            for name, run in runs.items():
                times[name].append(run())
        return times

    def slow_devices(self, count: int | None = None) -> SlowDevices:
        """The first ``count`` devices (None: all), for ``devices=`` of the callback."""
        return SlowDevices(self.devices[:count], self.link, self._cluster.explain, 1 / self._workers.cores)


@dataclasses.dataclass(eq=False)
class SlowDevices:
    """The workers, and what layers cost there: ``slower`` times as much as in this process.

    All schedules are planned with the same costs, those that were measured first.
    """

    devices: Sequence[str]
    link: Link
    explain: Callable[[Exception], Exception]
    slower: float
    _table: CostTable | None = None

    def costs(self, table: CostTable) -> CostTable:
        """The costs on these devices of layers that were measured in this process."""
        if self._table is None:
            layers = tuple(layer.slowed(self.slower) for layer in table.layers)
            self._table = dataclasses.replace(table, layers=layers)
        return self._table


def of_stages(schedule: Schedule) -> Schedule:
    """The schedule of :func:`stage_costs`, each one layer; a report's has the model's layers."""
    stages = tuple((stage, stage) for stage in range(len(schedule.stages)))
    return dataclasses.replace(schedule, stages=stages, recompute=())


def stage_costs(stages: Sequence[Mapping[str, Any]], slower: float) -> list[LayerCosts]:
    """The costs of the stages as the report has them, on devices that are so many times slower."""
    return [
        LayerCosts(
            **{SECONDS[kind]: slower * seconds for kind, seconds in stage["seconds"].items()},
            activation_bytes=stage["activation_bytes"],
            weight_bytes=stage["weight_bytes"],
            output_bytes=max(stage["sends"].values(), default=0),
        )
        for stage in stages
    ]
