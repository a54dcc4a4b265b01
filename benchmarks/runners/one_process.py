"""Stock Keras and ours in one process without limits, in turns of short fits."""

import time
from functools import partial

import tf_ooo
from benchmarks.cases import Case, Measured, WayRun, take_turns
from benchmarks.models import compared, make, make_devices, network_of, weights_of
from benchmarks.processes import command, quiet, result_of

# Fits of each way that are not counted.
_WARM = 2


def why_not(case: Case) -> str:
    """Return an empty text: any machine can run it."""
    return ""


def run(case: Case) -> Measured:
    """Run all ways in one process, which computes with as many threads as TensorFlow takes."""
    measured: Measured = result_of(command(f"{__name__}:measure", case), quiet(threads=None))
    return measured


def measure(case: Case) -> Measured:
    """Run all ways in this process; the first is stock ``fit``.

    With ``devices`` and ``microbatches`` ours are pipelines on so many devices of the CPU.
    """
    network, steps, (stock, *ours) = network_of(case.parameters), int(case.parameters["steps"]), case.ways
    pipeline = {
        name: case.parameters[name] for name in ("devices", "microbatches") if name in case.parameters
    }
    if pipeline:
        make_devices(pipeline["devices"])
    workloads = {way.name: make(network, pipeline.get("microbatches", 1)) for way in case.ways}
    callbacks = {way.name: tf_ooo.OOOBackprop(**way.options, **pipeline) for way in ours}

    def step_s(name: str) -> float:
        """Return the seconds of a step in a short fit, with what the fit does before its first one."""
        (model, x, y), own = workloads[name], [callbacks[name]] if name in callbacks else []
        began_s = time.perf_counter()
        model.fit(x, y, batch_size=len(x), epochs=steps, verbose=0, callbacks=own)
        return (time.perf_counter() - began_s) / steps

    turns_s = take_turns({name: partial(step_s, name) for name in workloads}, _WARM + case.turns)
    ways = {stock.name: WayRun(turns_s[stock.name][_WARM:])}
    for name, callback in callbacks.items():
        report = callback.report
        about = {"schedule": report.schedule, "moved_ops": report.moved_ops, "reason": report.fallback_reason}
        if pipeline:
            about["compiled_tasks"] = report.compiled_tasks
        ways[name] = WayRun(turns_s[name][_WARM:], report.predicted_step_s, about=about)
    weights = {name: weights_of(workload.model) for name, workload in workloads.items()}
    bits, ways = compared(ways, weights, weights.pop(stock.name))
    about = {"batch_rows": network.batch, "weights": workloads[stock.name].model.count_params()}
    return Measured(ways, bits, None, about)
