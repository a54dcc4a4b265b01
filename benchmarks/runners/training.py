"""The process that trains over workers: it makes each way of a case, and lets them take turns.

A way's options are those of ``tf_ooo.Pipeline``, or with ``"layerpipe": true`` of ``tf_ooo.LayerPipe``, but:

* ``{"stock": "one device"}`` is Keras' own step on the first worker,
* ``{"unfused": "1f1b"}`` runs the order of the way of that name, whose dO are sent before their dW have run,
* ``{"torch": "1f1b"}`` is a schedule of ``torch.distributed.pipelining``,
* ``{"alike": true}`` plans as if workers were alike, ``usual_microbatches`` with a fit's usual number.
"""

import os
import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import models
from benchmarks.cases import Case, Measured, Way, started
from benchmarks.machine.confine import FREE, Shares
from benchmarks.processes import BenchmarkError, Job
from benchmarks.runners import torch
from benchmarks.runners.steps import Fit, Profile, Steps, train_in_turns
from benchmarks.runners.workers import Workers
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError
from tf_ooo.hosts.cluster import Cluster, connect
from tf_ooo.modes.table import LayerPipe, Pipeline


def run(workers: Workers, case: Case) -> Measured:
    """Run all ways in this process; its devices are workers, and it only waits."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # The workers' executors take this number from here.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    shares, devices = Shares(workers.group), case.parameters["devices"]
    shares.put(FREE, os.getpid())
    cluster = connect(workers.cluster)
    shares.enter_computing(workers.processes)
    if "slow" in case.parameters:
        shares.set_share(devices - 1, workers.cores * case.parameters["slow"])
    training, ranks = Training(workers, case, cluster), None
    if schedules := [way.options["torch"] for way in case.ways if "torch" in way.options]:
        ranks = torch.ranks(workers.group, workers.folder, devices, training.microbatches, schedules)
    try:
        return training.run(shares, ranks)
    finally:
        if ranks is not None:
            ranks.end()


class Training:
    """One case on its workers."""

    def __init__(self, workers: Workers, case: Case, cluster: Cluster) -> None:
        self._workers, self._case, self._cluster = workers, case, cluster
        self.microbatches = case.parameters.get("microbatches") or 1
        self._network = models.network_of(case.parameters)
        self._make = partial(models.make, self._network, self.microbatches)
        self._orders: dict[str, Fit] = {}
        self._profiles: dict[int | None, Profile | None] = {}
        self._late_costs: CostTable | None = None

    def run(self, shares: Shares, ranks: Job | None) -> Measured:
        """Make all ways, let them take turns, and compare what they have trained with stock ``fit``."""
        # All models first: making one sets the seed, upon which TensorFlow compiles all functions anew.
        workloads = {way.name: self._make() for way in self._case.ways if "stock" not in way.options}

        def start(way: Way) -> Steps:
            if ranks is not None and "torch" in way.options:
                about = {"schedule": way.options["torch"], "torch": ranks.ask("version")}
                # Weights are not compared: other initial ones, other kernels.
                return Steps(partial(ranks.ask, way.options["torch"]), about=about)
            workload = workloads.get(way.name)
            return self._stock({}) if workload is None else self._started(way, workload)

        ways, not_run = started(self._case, start)
        for _ in range(2):  # the first steps with shares bring threads that are to have one, too
            if not shares.enter_computing(self._workers.processes):
                raise BenchmarkError("no worker has a thread that computes, by its name, to give it a share")
            for way in ways.values():
                way.step_s()
        late = any("layerpipe" in way.options for way in self._case.ways)  # gradients are
        steps, runs, bits = train_in_turns(ways, self._case.turns, self._turn_s, None if late else self._make)
        about = {
            "weights": next(way.model.count_params() for way in ways.values() if way.model is not None),
            "batch_rows": self._network.batch * self.microbatches,
            "steps": None if late else steps,
            "link": asdict(self._cluster.link or Link()),  # measured
        }
        return Measured(runs, bits, self._workers.cores, about, not_run)

    def _started(self, way: Way, workload: models.Workload) -> Steps:
        late = "layerpipe" in way.options
        fit = Fit(workload, *self._options(way))
        fit.start(2 * len(self._cluster.devices) + 2 if late else 2)
        if fit.report.fell_back:  # to a worker instead: this process has more of a core
            fit.finish()
            return self._stock({"schedule": "stock", "why": fit.report.fallback_reason})
        if late:
            self._late_costs = fit.report.costs
        else:
            self._profiles.setdefault(way.options.get("microbatches"), fit.profile)
        if "alike" in way.options:  # such a plan does not say what its step takes on these workers
            fit.predicted_s = None
        self._orders[way.name] = fit
        return fit

    def _options(self, way: Way) -> tuple[Pipeline | LayerPipe, Profile | None]:
        """Return what a way runs with, and the costs of the first one of as many micro-batches."""
        own, devices = dict(way.options), self._workers.cluster
        if own.pop("layerpipe", False):
            return LayerPipe(**own, devices=devices, costs=self._late_costs), None
        if "unfused" in own:
            own["schedule"] = self._unfused(own.pop("unfused"))
        profile = self._profiles.get(own.get("microbatches"))
        if own.pop("alike", False) and profile is not None:
            step, costs = profile
            speeds = costs.link.speeds
            profile = step, replace(costs, link=replace(costs.link, speeds=(max(speeds),) * len(speeds)))
        # Without comparing: this process, in which one device would train, has more of a core than a worker.
        # Without checks of the loss: batches 1, 2, 4, 8, ... take several times as long as others.
        common: dict[str, Any] = {"profile_steps": 2, "compare": False, "check_loss": False}
        usual = own.pop("usual_microbatches", False)
        count = None if usual else self._case.parameters.get("microbatches")
        return Pipeline(**(common | {"devices": devices, "microbatches": count} | own)), profile

    def _unfused(self, name: str) -> str:
        """Return a file with that way's order, in which a dO is sent before the dW of its stage has run."""
        if name not in self._orders:
            raise OOOError(f"{name} did not run")
        path = Path(self._workers.folder) / f"{name}.txt"
        path.write_text(replace(self._orders[name].schedule, fused_backward=False).to_text())
        return str(path)

    def _stock(self, about: dict[str, Any]) -> Steps:
        """Return Keras' own training steps on the first worker."""
        with tf.device(self._cluster.devices[0]):
            model, *data = self._make()
            model.optimizer.build(model.trainable_variables)
            batch = tuple(map(tf.constant, data))

        def step() -> tf.Tensor:
            with tf.device(self._cluster.devices[0]):
                return model.train_step(batch)["loss"]

        function = tf.function(step, autograph=False)
        stock = Steps(lambda: function().numpy(), model, about)
        for _ in range(2):
            stock.step_s()
        return stock

    def _turn_s(self, way: Steps) -> float:
        """Return the mean seconds of a step of a turn; with several, as many that fill rounds come first."""
        count = self._case.parameters.get("steps", 1)
        for _ in range(count if count > 1 else 0):
            way.step_s()
        return statistics.mean(way.step_s() for _ in range(count))
