"""The process that trains all ways of a case on emulated devices, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import torch_orders
from benchmarks.case import Case, Measured, WayRun
from benchmarks.emulated.costs import costs_of
from benchmarks.emulated.layer import batches_of, model_of
from benchmarks.emulated.observed import Observed
from benchmarks.emulated.waiting import LOG, Log, prefer
from benchmarks.models import check_sum, largest_difference, weights_of
from benchmarks.processes import end_with, requests
from benchmarks.turns import take_turns
from tf_ooo import Link, Pipeline
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError
from tf_ooo.fit.life import FitLife
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.pipeline.mode import PipelineMode
from tf_ooo.modes.pipeline.planning import Wanted, make_plan, step_s_of
from tf_ooo.planning.building.merging import merged
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.schedule_file import ScheduleFile
from tf_ooo.rewriting.unrolled_tasks import Step

# Tasks of a step of which a picture can be drawn; of more the median turn is not kept.
_MOST_DRAWN = 100
_TORCH: Mapping[str, Callable[..., Schedule]] = {
    "interleaved_zero_bubble": torch_orders.interleaved_zero_bubble,
    "zbv": torch_orders.zbv,
}


def schedule_of(options: Mapping[str, Any], table: CostTable, devices: int, microbatches: int) -> Schedule:
    """Plan a way of others, with the number of chunks that is fastest on paper.

    Raises:
        ValueError, OOOError: the schedule does not take so few layers or micro-batches.
    """
    if options.get("least_microbatches", 0) * devices > microbatches:
        raise ValueError(f"torch takes no fewer micro-batches than stages, got {microbatches}")
    units = tuple((layer, layer) for layer in range(len(table.layers)))
    basic = Wanted(options.get("schedule", "auto"), devices, microbatches, table.link)
    counts = range(2, len(units) // devices + 1)
    asked = []
    for chunks in [{"chunks": count} for count in counts] if "chunked" in options else [{}]:
        wanted = replace(basic, options=chunks)
        if "torch" in options:
            order = _TORCH[options["torch"]](devices, microbatches, **chunks)
            wanted = replace(basic, own=ScheduleFile(order.policy, order.to_text(), order))
        asked.append(wanted)
    plans = [make_plan(table.layers, units, each) for each in asked]
    if not plans:
        raise ValueError(f"{len(units)} layers are too few for two stages on each of {devices} devices")
    plan = min(plans, key=lambda plan: plan.trial.step_s)
    fused = plan.schedule.fused_backward and not options.get("unfused")
    return replace(plan.schedule, stages=plan.problem.bounds, fused_backward=fused)


class Run:
    """The steps of one way; the first of them makes the plan."""

    def __init__(self, options: Pipeline, table: CostTable, known: tuple[Step, CostTable] | None) -> None:
        self.model, self.steps = model_of(table), 0
        self.mode = PipelineMode(options)
        self.mode.planned_from = known  # the same model's: no other step has to be traced
        self._fit = FitLife(self.mode)
        self._batches = iter(batches_of(options.microbatches or 1))
        self.model.make_train_function()
        self._fit.begin(self.model)
        self.report = self._fit.report
        while self.report.rewritten_graph is None or self.report.planned is None:
            self.step_s()
        self.schedule = self.report.planned
        self.observed = Observed(self.schedule, tasks_of(self.report.rewritten_graph))

    def step_s(self) -> float:
        """Run a step until its loss is there, and return its seconds."""
        started_s = time.perf_counter()
        float(self.model.train_function(self._batches)["loss"])
        self.steps += 1
        return time.perf_counter() - started_s

    def observed_step_s(self, log: Log) -> float:
        """Run a step, look at its log, and return its seconds."""
        log.new()
        took_s = self.step_s()
        self.observed.add(took_s, log.new())
        return took_s

    def end(self, steps: int) -> None:
        """Go on to so many steps, and put the model back together."""
        while self.steps < steps:
            self.step_s()
        self._fit.finish()


def runs_of(case: Case, table: CostTable) -> tuple[dict[str, Run], dict[str, str]]:
    """Start each way, and say why others do not run.

    The first way's schedule is a file: costs of whole layers are then taken as they are, and no layer is
    divided, in the ways behind it neither.
    """
    runs: dict[str, Run] = {}
    not_run: dict[str, str] = {}
    devices, microbatches = case.parameters["devices"], case.parameters["microbatches"]
    with tempfile.TemporaryDirectory() as folder:
        for way in case.ways:
            schedule = "auto"
            try:
                if "auto" not in way.options:
                    schedule = f"{folder}/{way.name}.txt"
                    text = schedule_of(way.options, table, devices, microbatches).to_text()
                    Path(schedule).write_text(text)
                options = Pipeline(
                    devices=case.parameters["cluster"] or devices,
                    microbatches=microbatches,
                    schedule=schedule,
                    profile_steps=0,
                    costs=table,
                    compare=False,
                    check_loss=False,
                )
                known = next((run.mode.planned_from for run in runs.values()), None)
                runs[way.name] = Run(options, table, known)
            except (ValueError, OOOError) as error:
                not_run[way.name] = str(error)
    return runs, not_run


def measured(case: Case) -> Measured:
    """Run all ways in turns, and train with stock Keras as often."""
    parameters, log = case.parameters, Log(environ[LOG])
    names = ("model", "layers", "devices", "task_s", "latency_s")
    table = costs_of(*(parameters[name] for name in names))
    log.wait(0)
    runs, not_run = runs_of(case, table)
    preferred = prefer()
    log.wait(1)
    steps = {name: partial(run.observed_step_s, log) for name, run in runs.items()}
    take_turns({name: run.step_s for name, run in runs.items()}, 1)
    turns = take_turns(steps, case.turns)
    log.wait(0)
    count = max(run.steps for run in runs.values())
    stock = model_of(table)
    stock.fit(batches_of(parameters["microbatches"]), steps_per_epoch=count, verbose=0)
    weights = weights_of(stock)
    ways = {}
    for name, run in runs.items():
        run.end(count)
        far = largest_difference(weights_of(run.model), weights)
        ways[name] = WayRun(
            turns[name], run.report.predicted_step_s, check_sum(run.model), far, _about(run, table)
        )
    about = {"weights": sum(weight.size for weight in weights), "steps": count, "preferred": preferred}
    return Measured(ways, check_sum(stock), about=about, not_run=not_run)


def _about(run: Run, table: CostTable) -> dict[str, Any]:
    schedule = run.schedule
    stages = merged(table.layers, schedule.stages, schedule.microbatches)
    turn = run.observed.median_turn()
    return {
        "schedule": schedule.policy,
        "chunks": len(schedule.stages) // schedule.devices,
        "fused": schedule.fused_backward,
        "simulated_s": step_s_of(replace(schedule, stages=()), stages, Link()),  # with no time in between
        **run.observed.to_dict(),
        **({"order": schedule.to_text()} if run.mode.options.schedule == "auto" else {}),
        **({"turn": turn} if len(turn) <= _MOST_DRAWN else {}),
    }


def main() -> None:
    """Measure the case that this process was given; with workers it computes nothing itself."""
    (case,) = requests(Case)
    devices = case.parameters["devices"]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * devices + 4)
    if not case.parameters["cluster"]:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    end_with(measured(case))


if __name__ == "__main__":
    main()
