"""The process that trains over workers: it makes each way of a case, and lets them take turns.

A way's options are those of ``tf_ooo.Pipeline``, or with ``"layerpipe": true`` of ``tf_ooo.LayerPipe``, but:

* ``{"stock": "one device"}`` is Keras' own step on the first worker,
* ``{"unfused": "1f1b"}`` runs the order of the way of that name, whose dO are sent before their dW have run,
* ``{"torch": "1f1b"}`` is a schedule of ``torch.distributed.pipelining``,
* ``{"alike": true}`` plans as if all workers were as fast as the first.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks import models
from benchmarks.case import Case, Measured, Way, WayRun
from benchmarks.machine import confine
from benchmarks.processes import BenchmarkError, end_with, requests
from benchmarks.runners.steps import Fit, Steps, Stock
from benchmarks.runners.torch import Ranks, TorchSteps
from benchmarks.runners.workers import Workers
from benchmarks.turns import take_turns
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError
from tf_ooo.modes.table import LayerPipe, Pipeline
from tf_ooo.rewriting.unrolled_tasks import Step


class ConfinedCluster:
    """Workers whose computing threads have their share of the CPU; this process only waits."""

    def __init__(self, workers: Workers) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        # The workers' executors take this number from here.
        tf.config.threading.set_inter_op_parallelism_threads(4)
        confine.leave_free(workers.group, os.getpid())
        from tf_ooo.hosts.cluster import connect  # noqa: PLC0415 - threads first

        self._workers, cluster = workers, connect(workers.cluster)
        self._confine()
        self.devices: Sequence[str] = cluster.devices  # full names, by task
        self.link = cluster.link or Link()  # measured

    def confine(self) -> None:
        """Give threads that have come since the start their shares, too.

        Raises:
            BenchmarkError: no worker has any thread that TensorFlow computes with.
        """
        if not any(self._confine()):
            raise BenchmarkError("no worker has a thread that computes, by its name, to give it its share")

    def _confine(self) -> list[int]:
        processes = enumerate(self._workers.processes)
        return [confine.enter_computing(self._workers.group, rank, process) for rank, process in processes]


class Training:
    """One case on its workers."""

    def __init__(self, workers: Workers, case: Case) -> None:
        self._workers, self._case, given = workers, case, case.parameters
        self._network = models.network_of(given, getattr(models, given.get("networks", "PIPELINE")))
        self._microbatches = given.get("microbatches") or 1
        self._cluster = ConfinedCluster(workers)
        if "slow" in given:
            confine.set_share(workers.group, given["devices"] - 1, workers.cores * given["slow"])
        self._late = any("layerpipe" in way.options for way in case.ways)  # gradients are
        self._make = partial(models.make, self._network, self._microbatches)
        self._ways: dict[str, Steps] = {}
        self._measured: dict[int | None, tuple[Step, CostTable]] = {}
        self._late_costs: CostTable | None = None
        self._alike = {way.name for way in case.ways if "alike" in way.options}
        self._about: dict[str, dict[str, Any]] = {}

    def run(self) -> Measured:
        """Make all ways, let them take turns, and compare what they have trained with stock ``fit``."""
        not_run = self._start()
        for _ in range(2):  # the first steps with shares bring threads that are to have one, too
            self._cluster.confine()
            for way in self._ways.values():
                way.step_s()
        turns_s = take_turns(
            {name: partial(self._turn_s, way) for name, way in self._ways.items()}, self._case.turns
        )
        steps = 0 if self._late else self._even_out()
        for name, way in self._ways.items():
            self._about[name] |= way.about()
        runs = {
            # A plan as if all workers were alike does not say what its step takes on these.
            name: WayRun(
                turns_s[name], None if name in self._alike else way.predicted_s, about=self._about[name]
            )
            for name, way in self._ways.items()
        }
        finished = {name: way.finish() for name, way in self._ways.items()}
        trained = {name: model for name, model in finished.items() if model is not None}
        stock_bits, runs = (None, runs) if self._late else self._compared(runs, trained, steps)
        if "_ranks" in vars(self):
            self._ranks.close()
        about = {
            "weights": next(iter(trained.values())).count_params(),
            "batch_rows": self._network.batch * self._microbatches,
            "steps": steps or None,
            "link": dataclasses.asdict(self._cluster.link),
        }
        return Measured(runs, stock_bits, self._workers.cores, about, not_run)

    def _even_out(self) -> int:
        """Run steps until all ways have run equally many, and return how many."""
        steps = max(way.steps for way in self._ways.values())
        for way in self._ways.values():
            while way.steps < steps:
                way.step_s()
        return steps

    def _compared(
        self, runs: Mapping[str, WayRun], trained: Mapping[str, keras.Model], steps: int
    ) -> tuple[int, dict[str, WayRun]]:
        """Return the bits of stock ``fit``, in this process, and runs with what they differ from it."""
        bits = {name: models.check_sum(model) for name, model in trained.items()}
        weights = {name: models.weights_of(model) for name, model in trained.items()}
        model, x, y = self._make()
        model.fit(x, y, batch_size=len(x), epochs=steps, shuffle=False, verbose=0)
        stock = models.weights_of(model)
        differences = {name: models.largest_difference(of, stock) for name, of in weights.items()}
        return models.check_sum(model), {
            name: dataclasses.replace(run, bits=bits.get(name), largest_difference=differences.get(name))
            for name, run in runs.items()
        }

    def _start(self) -> dict[str, str]:
        """Make all ways and run their first steps; return why some could not."""
        # All models first: making one sets the seed, upon which TensorFlow compiles all functions anew.
        workloads = {way.name: None if "stock" in way.options else self._make() for way in self._case.ways}
        not_run = {}
        for way in self._case.ways:
            self._about[way.name] = {}
            try:
                self._ways[way.name] = self._started(way, workloads[way.name])
            except OOOError as error:
                not_run[way.name] = str(error)
        return not_run

    def _started(self, way: Way, workload: models.Workload | None) -> Steps:
        if "torch" in way.options:
            return TorchSteps(self._ranks, way.options["torch"])
        if workload is None:
            return self._stock()
        late = "layerpipe" in way.options
        fit = self._layerpipe(way, workload) if late else self._pipeline(way, workload)
        try:
            fit.start(2 * len(self._cluster.devices) + 2 if late else 2)
        except OOOError:
            fit.finish()
            raise
        if fit.report.fell_back:  # to a worker instead: this process has more of a core
            fit.finish()
            self._about[way.name] = {"schedule": "stock", "why": fit.report.fallback_reason}
            return self._stock()
        if late:
            self._late_costs = fit.report.costs
        elif fit.measured is not None:
            self._measured.setdefault(way.options.get("microbatches"), fit.measured)
        return fit

    def _layerpipe(self, way: Way, workload: models.Workload) -> Fit:
        """Begin a LayerPipe that is planned with the costs of the first one."""
        options = {**way.options, "devices": self._workers.cluster, "costs": self._late_costs}
        options.pop("layerpipe")
        return Fit(workload, LayerPipe(**options))

    def _pipeline(self, way: Way, workload: models.Workload) -> Fit:
        """Begin a pipeline that is planned with the costs of the first one with as many micro-batches."""
        # Without comparing: this process, in which one device would train, has more of a core than a worker.
        common: dict[str, Any] = {"devices": self._workers.cluster, "profile_steps": 2, "compare": False}
        options = {**common, "microbatches": self._case.parameters.get("microbatches"), **way.options}
        if "unfused" in options:
            options["schedule"] = self._unfused(options.pop("unfused"))
        alike, measured = options.pop("alike", False), self._measured.get(way.options.get("microbatches"))
        if alike and measured is not None:
            step, costs = measured
            speeds = costs.link.speeds
            link = dataclasses.replace(costs.link, speeds=(max(speeds),) * len(speeds))
            measured = step, dataclasses.replace(costs, link=link)
        return Fit(workload, Pipeline(**options), measured)

    def _unfused(self, name: str) -> str:
        """Return a file with that way's order, in which a dO is sent before the dW of its stage has run."""
        fused, path = self._ways.get(name), Path(self._workers.folder) / f"{name}.txt"
        if not isinstance(fused, Fit):
            raise OOOError(f"{name} did not run")
        path.write_text(dataclasses.replace(fused.schedule, fused_backward=False).to_text())
        return str(path)

    @cached_property
    def _ranks(self) -> Ranks:
        """Processes of torch, which run all of the case's schedules that are theirs."""
        schedules = [way.options["torch"] for way in self._case.ways if "torch" in way.options]
        return Ranks(self._workers.group, len(self._cluster.devices), self._microbatches, schedules)

    def _stock(self) -> Stock:
        stock = Stock(self._make, self._cluster.devices[0])
        for _ in range(2):
            stock.step_s()
        return stock

    def _turn_s(self, way: Steps) -> float:
        """Return the mean seconds of a step of a turn; with several, as many that fill rounds come first."""
        count = self._case.parameters.get("steps", 1)
        for _ in range(count if count > 1 else 0):
            way.step_s()
        return statistics.mean(way.step_s() for _ in range(count))


if __name__ == "__main__":
    end_with(Training(*requests(Workers, Case)).run())
