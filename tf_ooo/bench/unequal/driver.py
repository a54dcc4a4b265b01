"""The process that trains one model of ``tf-ooo bench unequal`` in every way, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from tf_ooo.bench.mesh.cases import CASES
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.cluster import ConfinedCluster
from tf_ooo.bench.shared.drivers import Workers
from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.steps import InTurn, Stock
from tf_ooo.bench.shared.workloads import make
from tf_ooo.bench.unequal.rows import ALIKE, CHOSEN, ONE_DEVICE, OWN_SPEEDS, UnequalMeasured, UnequalRun
from tf_ooo.modes.table import Pipeline
from tf_ooo.report.environment import environment


def main(workers: Workers, asked: UnequalRun) -> UnequalMeasured:
    """Three pipelines from one measurement of layers, link and workers, and one worker that trains alone."""
    cluster, network = ConfinedCluster(workers), CASES[asked.case]
    count = len(cluster.devices)
    confine.set_share(workers.group, count - 1, workers.cores * asked.slow)
    options = Pipeline(
        devices=workers.cluster, microbatches=asked.microbatches, profile_steps=2, compare=False
    )
    free = dataclasses.replace(options, replicas="auto", fall_back=True)
    # All models first: making one sets the seed, upon which TensorFlow compiles all functions anew.
    workloads = [make(network, asked.microbatches) for _ in range(3)]
    own = InTurn(workloads[0], options)
    own.start(2)
    assert own.measured is not None
    step, costs = own.measured
    speeds = costs.link.speeds
    alike = dataclasses.replace(costs, link=dataclasses.replace(costs.link, speeds=()))
    fits = {
        OWN_SPEEDS: own,
        ALIKE: InTurn(workloads[1], options, (step, alike)),
        CHOSEN: InTurn(workloads[2], free, (step, costs)),
    }
    for name in (ALIKE, CHOSEN):
        fits[name].start(2)
    alone = Stock(partial(make, network, asked.microbatches), cluster.devices[:1])
    alone.start()
    runs: dict[str, Callable[[], float]] = {name: fit.step_s for name, fit in fits.items()}
    times = cluster.times_s({**runs, ONE_DEVICE: alone.step_s})
    used = [list(cluster.devices).index(name) for name in fits[CHOSEN].report.pipeline.devices]
    predicted_s = {name: fit.report.predicted_step_s or 0.0 for name, fit in fits.items()}
    for fit in fits.values():
        fit.finish()
    return {
        "devices": count,
        "cores": workers.cores,
        "speeds": list(speeds),
        "used": used,
        "times": times,
        "predicted_s": predicted_s,
        "environment": environment(workloads[0].model),
        "date": own.report.date,
    }


if __name__ == "__main__":
    end_with(main(*requests(Workers, UnequalRun)))
