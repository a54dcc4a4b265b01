"""The process that trains over workers: it makes each way of a case, and lets them take turns.

A way's options are those of ``tf_ooo.Pipeline``, or with ``"layerpipe": true`` of ``tf_ooo.LayerPipe``, but:

* ``{"stock": "one device"}`` is Keras' own step on the first worker,
* ``{"unfused": "1f1b"}`` runs the order of the way of that name, whose dO are sent before their dW have run,
* ``{"torch": "1f1b"}`` is a schedule of ``torch.distributed.pipelining``,
* ``{"alike": true}`` plans as if all workers were as fast as the first.
"""

import os
import statistics
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import models
from benchmarks.case import Case, Measured, Way
from benchmarks.machine.confine import FREE, Shares
from benchmarks.processes import BenchmarkError
from benchmarks.runners.steps import Fit, Steps, stock_steps, train_in_turns
from benchmarks.runners.torch import Ranks
from benchmarks.runners.workers import Workers
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError
from tf_ooo.hosts.cluster import Cluster, connect
from tf_ooo.modes.table import LayerPipe, Pipeline
from tf_ooo.rewriting.unrolled_tasks import Step


def run(workers: Workers, case: Case) -> Measured:
    """Run all ways in this process; its devices are workers, and it only waits."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # The workers' executors take this number from here.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    shares = Shares(workers.group)
    shares.put(FREE, os.getpid())
    cluster = connect(workers.cluster)
    shares.enter_computing(workers.processes)
    if "slow" in case.parameters:
        shares.set_share(case.parameters["devices"] - 1, workers.cores * case.parameters["slow"])
    return Training(workers, case, cluster).run()


class Training:
    """One case on its workers."""

    def __init__(self, workers: Workers, case: Case, cluster: Cluster) -> None:
        self._workers, self._case, self._cluster = workers, case, cluster
        self._network, given = models.network_of(case.parameters), case.parameters
        self._microbatches = given.get("microbatches") or 1
        self._late = any("layerpipe" in way.options for way in case.ways)  # gradients are
        self._make = partial(models.make, self._network, self._microbatches)
        self._ways: dict[str, Steps] = {}
        self._measured: dict[int | None, tuple[Step, CostTable]] = {}
        self._late_costs: CostTable | None = None

    def run(self) -> Measured:
        """Make all ways, let them take turns, and compare what they have trained with stock ``fit``."""
        not_run = self._start()
        for _ in range(2):  # the first steps with shares bring threads that are to have one, too
            if not Shares(self._workers.group).enter_computing(self._workers.processes):
                raise BenchmarkError("no worker has a thread that computes, by its name, to give it a share")
            for way in self._ways.values():
                way.step_s()
        steps, runs, trained = train_in_turns(self._ways, self._case.turns, self._turn_s, not self._late)
        stock_bits = None
        if not self._late:
            stock_bits, runs = models.compared(runs, trained, models.stock_weights(self._make(), steps))
        if "_ranks" in vars(self):
            self._ranks.close()
        about = {
            "weights": next(way.model.count_params() for way in self._ways.values() if way.model is not None),
            "batch_rows": self._network.batch * self._microbatches,
            "steps": None if self._late else steps,
            "link": asdict(self._cluster.link or Link()),  # measured
        }
        return Measured(runs, stock_bits, self._workers.cores, about, not_run)

    def _start(self) -> dict[str, str]:
        """Make all ways and run their first steps; return why some could not."""
        # All models first: making one sets the seed, upon which TensorFlow compiles all functions anew.
        workloads = {way.name: None if "stock" in way.options else self._make() for way in self._case.ways}
        not_run = {}
        for way in self._case.ways:
            try:
                self._ways[way.name] = self._started(way, workloads[way.name])
            except OOOError as error:
                not_run[way.name] = str(error)
        return not_run

    def _started(self, way: Way, workload: models.Workload | None) -> Steps:
        if "torch" in way.options:
            name = way.options["torch"]
            about = {"schedule": name, "torch": self._ranks.version}
            # Weights are not compared: other initial ones, other kernels.
            return Steps(partial(self._ranks.step, name), about=about)
        if workload is None:
            return self._stock({})
        late = "layerpipe" in way.options
        fit = Fit(workload, *self._options(way))
        try:
            fit.start(2 * len(self._cluster.devices) + 2 if late else 2)
        except OOOError:
            fit.finish()
            raise
        if fit.report.fell_back:  # to a worker instead: this process has more of a core
            fit.finish()
            return self._stock({"schedule": "stock", "why": fit.report.fallback_reason})
        if late:
            self._late_costs = fit.report.costs
        elif fit.measured is not None:
            self._measured.setdefault(way.options.get("microbatches"), fit.measured)
        if "alike" in way.options:  # such a plan does not say what its step takes on these workers
            fit.predicted_s = None
        return fit

    def _options(self, way: Way) -> tuple[Pipeline | LayerPipe, tuple[Step, CostTable] | None]:
        """Return what a way runs with, and the costs of the first one of as many micro-batches."""
        own, devices = dict(way.options), self._workers.cluster
        if own.pop("layerpipe", False):
            return LayerPipe(**own, devices=devices, costs=self._late_costs), None
        if "unfused" in own:
            own["schedule"] = self._unfused(own.pop("unfused"))
        measured = self._measured.get(own.get("microbatches"))
        if own.pop("alike", False) and measured is not None:
            step, costs = measured
            speeds = costs.link.speeds
            link = replace(costs.link, speeds=(max(speeds),) * len(speeds))
            measured = step, replace(costs, link=link)
        microbatches = self._case.parameters.get("microbatches")
        # Without comparing: this process, in which one device would train, has more of a core than a worker.
        common: dict[str, Any] = {
            "microbatches": microbatches,
            "profile_steps": 2,
            "compare": False,
            "devices": devices,
        }
        return Pipeline(**(common | own)), measured

    def _unfused(self, name: str) -> str:
        """Return a file with that way's order, in which a dO is sent before the dW of its stage has run."""
        fused, path = self._ways.get(name), Path(self._workers.folder) / f"{name}.txt"
        if not isinstance(fused, Fit):
            raise OOOError(f"{name} did not run")
        path.write_text(replace(fused.schedule, fused_backward=False).to_text())
        return str(path)

    @cached_property
    def _ranks(self) -> Ranks:
        """Processes of torch, which run all of the case's schedules that are theirs."""
        schedules = [way.options["torch"] for way in self._case.ways if "torch" in way.options]
        return Ranks(self._workers.group, len(self._cluster.devices), self._microbatches, schedules)

    def _stock(self, about: dict[str, Any]) -> Steps:
        stock = stock_steps(self._make, self._cluster.devices[0], about)
        for _ in range(2):
            stock.step_s()
        return stock

    def _turn_s(self, way: Steps) -> float:
        """Return the mean seconds of a step of a turn; with several, as many that fill rounds come first."""
        count = self._case.parameters.get("steps", 1)
        for _ in range(count if count > 1 else 0):
            way.step_s()
        return statistics.mean(way.step_s() for _ in range(count))
