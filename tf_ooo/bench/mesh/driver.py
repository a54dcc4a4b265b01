"""The process that trains one model of ``tf-ooo bench mesh`` in every way, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from tf_ooo.bench.mesh.cases import CASES
from tf_ooo.bench.mesh.rows import ONE_DEVICE, MeshMeasured, MeshRun, name_of
from tf_ooo.bench.shared.cluster import ConfinedCluster
from tf_ooo.bench.shared.drivers import Workers
from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.steps import InTurn, Stock
from tf_ooo.bench.shared.workloads import make
from tf_ooo.modes.table import Pipeline
from tf_ooo.report.environment import environment

AUTO = "auto"


def main(workers: Workers, asked: MeshRun) -> MeshMeasured:
    """Of each number of replicas the steps in turns, and those of one worker that trains alone."""
    cluster, network = ConfinedCluster(workers), CASES[asked.case]
    count = len(cluster.devices)
    options = Pipeline(
        devices=cluster.slow_devices(),
        microbatches=asked.microbatches,
        profile_steps=2,
        compare=False,
        replicas=AUTO,
    )
    # All models first: making one sets the seed, upon which TensorFlow compiles all functions anew.
    workloads = {number: make(network, asked.microbatches) for number in asked.replicas}
    chooser = InTurn(make(network, asked.microbatches), options)
    chooser.start(0)
    section = chooser.report.pipeline
    predicted_s = {
        name_of(row.replicas, count): row.predicted_step_s or 0.0 for row in section.compared_replicas
    }
    chosen = name_of(section.replicas, count)
    measured = chooser.measured
    chooser.finish()
    runs: dict[str, Callable[[], float]] = {}
    fits: list[InTurn] = []
    schedules: dict[str, str] = {}
    for number, workload in workloads.items():
        fit = InTurn(workload, dataclasses.replace(options, replicas=number), measured)
        fit.start(2)
        runs[name_of(number, count)], schedules[name_of(number, count)] = fit.step_s, fit.report.schedule
        fits.append(fit)
    alone = Stock(partial(make, network, asked.microbatches), cluster.devices[:1])
    alone.start()
    times = cluster.times_s({**runs, ONE_DEVICE: alone.step_s})
    for fit in fits:
        fit.finish()
    return {
        "devices": count,
        "cores": workers.cores,
        "times": times,
        "predicted_s": predicted_s,
        "schedules": schedules,
        "chosen": chosen,
        "environment": environment(next(iter(workloads.values())).model),
        "date": chooser.report.date,
    }


if __name__ == "__main__":
    end_with(main(*requests(Workers, MeshRun)))
