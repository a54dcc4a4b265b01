"""Stock Keras and ours in one process without limits, in turns of short fits."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case, Measured, WayRun
from benchmarks.models import ONE_CPU, Workload, check_sum, largest_difference, make, network_of, weights_of
from benchmarks.processes import command, end_with, measured_from, quiet, requests, result_of
from benchmarks.turns import take_turns

if TYPE_CHECKING:
    import keras

# Fits of each way that are not counted.
_WARM = 2


def why_not(case: Case) -> str:
    """Return an empty text: any machine can run it."""
    return ""


def run(case: Case) -> Measured:
    """Run all ways in one process, which computes with as many threads as TensorFlow takes."""
    return measured_from(result_of(command(__name__, case), quiet(threads=None)))


def measure(case: Case) -> Measured:
    """Run all ways in this process; the first is stock ``fit``."""
    network, steps = network_of(case.parameters, ONE_CPU), case.parameters["steps"]
    workloads = {way.name: make(network) for way in case.ways}
    callbacks = {way.name: _callback(way.options) for way in case.ways}
    fits = {
        name: functools.partial(_step_s, workload, steps, callbacks[name])
        for name, workload in workloads.items()
    }
    turns_s = take_turns(fits, _WARM + case.turns)
    stock, *_ = workloads
    ways = {name: WayRun(turns_s[name][_WARM:]) for name in workloads}
    for name, callback in callbacks.items():
        if callback is None:
            continue
        report = callback.report
        ways[name] = WayRun(
            turns_s[name][_WARM:],
            predicted_s=report.predicted_step_s,
            bits=check_sum(workloads[name].model),
            largest_difference=largest_difference(
                weights_of(workloads[name].model), weights_of(workloads[stock].model)
            ),
            about={
                "schedule": report.schedule,
                "moved_ops": report.moved_ops,
                "reason": report.fallback_reason,
            },
        )
    about = {"batch_rows": network.batch, "weights": workloads[stock].model.count_params()}
    return Measured(ways, check_sum(workloads[stock].model), None, about)


def _callback(options: Any) -> Any:
    """Return ours with a way's options; None: the way is stock."""
    import tf_ooo

    return None if options.get("stock") else tf_ooo.OOOBackprop(**options)


def _step_s(workload: Workload, steps: int, callback: keras.callbacks.Callback | None) -> float:
    """Return the seconds of a step in a short fit, with what the fit does before its first one."""
    began_s = time.perf_counter()
    workload.model.fit(
        workload.x, workload.y, batch_size=len(workload.x), epochs=steps, verbose=0,
        callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    return (time.perf_counter() - began_s) / steps


if __name__ == "__main__":
    end_with(measure(*requests(Case)))
