"""The process that trains one workload of ``tf-ooo bench prediction``; of ranks each runs it."""

from __future__ import annotations

import os
import statistics

import tensorflow as tf

import tf_ooo
from tf_ooo.bench.prediction.cases import CASES, LOGICAL, RANKS, PredictionCase
from tf_ooo.bench.prediction.rows import PredictionRun, error_of
from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.workloads import make
from tf_ooo.options import ModeOptions
from tf_ooo.report.environment import environment

# Steps of a fit before its plan runs, those that trace included: rather too many.
_BEFORE = 8
# Executions of each order that trace, or warm up.
_WARM = 2


def main(asked: PredictionRun) -> None:
    """Trains; the first rank tells."""
    case = CASES[asked.case]
    if case.where == LOGICAL:
        configurations = [tf.config.LogicalDeviceConfiguration()] * case.devices
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, configurations)
    row = row_of(asked, case)
    if int(os.environ.get("HOROVOD_RANK", "0")) == 0:
        end_with(row)
    os._exit(0)  # the first rank may be gone


def row_of(asked: PredictionRun, case: PredictionCase) -> Row:
    """Predicted, before any step of the plan has run, and measured."""
    ranks = case.where == RANKS
    workload = make(case.network, 1 if ranks else case.microbatches, case.optimizer)
    steps = _BEFORE + asked.steps
    if ranks:
        model, together = workload.model, case.microbatches
        model.compile(model.optimizer, model.loss, jit_compile=False, steps_per_execution=together)
        # As many executions in the stock order take turns with those of the plan.
        steps = _BEFORE + 2 * together * (_executions(asked, case) + _WARM)
    callback = tf_ooo.OOOBackprop(options_of(asked, case))
    data = tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat(steps)
    workload.model.fit(data, verbose=0, callbacks=[callback])
    seconds = callback.report.steps_s
    report = callback.report
    row: Row = {
        "workload": asked.case, "repetition": asked.repetition, "where": case.where, "devices": case.devices,
        "schedule": case.schedule, "runs": report.schedule, "optimizer": case.optimizer,
        "microbatches": case.microbatches, "rows": len(workload.x), "date": report.date,
        "environment": environment(workload.model),
    }  # fmt: skip
    if report.predicted_step_s is None or not seconds:
        return {**row, "failed": "; ".join([report.headline, *report.notes])}
    return {
        **row,
        "predicted_s": report.predicted_step_s,
        "measured_s": statistics.median(seconds),
        "step_s_min": min(seconds),
        "step_s_max": max(seconds),
        "error": error_of(report.predicted_step_s, seconds),
        "step_s": [round(second, 6) for second in seconds],
        "said": dict(report.rows()).get("predicted"),
        "serial_step_s": report.pipeline.serial_step_s or None,
        "link": dict(report.pipeline.link or {}),
        "bubble_fraction": report.pipeline.predicted_bubble_fraction,
    }


def options_of(asked: PredictionRun, case: PredictionCase) -> ModeOptions:
    """What the callback is given: nothing is measured beside the steps of pipelines."""
    if case.where == RANKS:
        return tf_ooo.DataParallel(
            schedule=case.schedule, unroll=case.microbatches, profile_steps=_executions(asked, case),
            compare=False,
        )  # fmt: skip
    devices = case.devices if case.where == LOGICAL else None  # None: those of the cluster
    return tf_ooo.Pipeline(
        devices=devices, schedule=case.schedule, microbatches=case.microbatches, compare=False
    )


def _executions(asked: PredictionRun, case: PredictionCase) -> int:
    return -(-asked.steps // case.microbatches)


if __name__ == "__main__":
    main(*requests(PredictionRun))
