"""The process that trains in the pipeline benchmark; started by ``tf_ooo.bench.pipeline.command``.

Its workers' computing threads have their share of the CPU; this process has none, it only waits.
All schedules take turns, step by step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tf_ooo.bench.pipeline.gantt import busy_seconds, measured_timeline, task_seconds, task_times, traced
from tf_ooo.bench.pipeline.pytorch import TorchRanks
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.peak_memory import step_bytes
from tf_ooo.bench.shared.runs import Scheduled, Stock
from tf_ooo.bench.shared.workloads import make
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline


def main() -> None:
    """Reads the command line, runs, writes what was found as JSON."""
    parser = parser_of_driver()
    parser.add_argument("--schedules", required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--pictures", default="")
    parser.add_argument("--torch", action="store_true")
    run_and_end(Driver, parser.parse_args())


def parser_of_driver() -> argparse.ArgumentParser:
    """The arguments that ``run_driver`` gives to all drivers."""
    parser = argparse.ArgumentParser()
    for name in ("cluster", "group", "processes", "workload", "memory", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cores", type=float, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    return parser


def run_and_end(driver: Callable[[argparse.Namespace], Any], options: argparse.Namespace) -> None:
    """Writes what the driver finds, and ends the process: its cluster would keep it."""
    Path(options.out).write_text(json.dumps(driver(options).run()))
    os._exit(0)


class Devices:
    """What the callback is given as ``devices=``: the workers, and what the layers cost there.

    All schedules are planned with the same costs, those that were measured first.
    """

    def __init__(self, cluster: Any, link: Link, slower: float) -> None:
        self.devices, self.explain, self.link = cluster.devices, cluster.explain, link
        self._slower = slower
        self._table: CostTable | None = None

    def costs(self, table: CostTable) -> CostTable:
        """Costs measured in this process, on devices that are ``slower`` times as slow."""
        if self._table is None:
            layers = tuple(slowed(layer, self._slower) for layer in table.layers)
            self._table = dataclasses.replace(table, layers=layers)
        return self._table


def slowed(layer: LayerCosts, factor: float) -> LayerCosts:
    """The costs on a device that is ``factor`` times as slow."""
    seconds = ("forward_s", "output_grad_s", "weight_grad_s", "update_s")
    return dataclasses.replace(layer, **{name: factor * getattr(layer, name) for name in seconds})


@dataclasses.dataclass(frozen=True)
class Slower:
    """How many times slower a worker computes than planned: ``alone``, and with all others (``together``)."""

    alone: float
    together: float

    def when_busy(self, share: float) -> float:
        """With so large a share of the others computing at a time."""
        return self.alone + share * (self.together - self.alone)


class ConfinedCluster:
    """The workers, whose computing threads have their share of the CPU, seen from the process that trains."""

    def __init__(self, options: argparse.Namespace) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        # The workers' executors take this number from here.
        tf.config.threading.set_inter_op_parallelism_threads(4)
        confine.leave_free(options.group, os.getpid())
        from tf_ooo.hosts.cluster import connect  # noqa: PLC0415 - threads first

        self.options = options
        self.cluster = connect(options.cluster)
        self._confine()
        self.link = self.cluster.link or Link()

    def _confine(self) -> None:
        for rank, process in enumerate(self.options.processes.split(",")):
            confine.enter_computing(self.options.group, rank, int(process))

    def rounds(
        self, runs: dict[str, Any], times_s: Callable[[Any], Sequence[float]]
    ) -> dict[str, list[float]]:
        """The seconds of all, in turns; threads that have come since the start are confined before."""
        self._confine()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.options.repetitions):
            for name, run in runs.items():
                times[name] += times_s(run)
        return times


class Driver(ConfinedCluster):
    """One workload on one number of devices."""

    def run(self) -> dict[str, Any]:
        """Times and reports of everything."""
        options, devices = self.options, self.cluster.devices
        microbatches = options.microbatches
        whole, part = (partial(make, options.workload, microbatches // parts) for parts in (1, len(devices)))
        runs: dict[str, Any] = {"serial": Stock(whole, devices[:1])}
        if microbatches % len(devices) == 0:
            runs["local"] = Stock(part, devices)
        given = Devices(self.cluster, self.link, 1 / options.cores)
        arguments = {"devices": given, "microbatches": microbatches, "profile_steps": 1}
        measured, steps = None, 0
        # All models first: making one sets the seed, upon which TensorFlow compiles all functions anew.
        workloads = {name: make(options.workload, microbatches) for name in options.schedules.split(",")}
        for name, workload in workloads.items():
            runs[name] = run = Scheduled(workload, {**arguments, "schedule": name}, measured)
            run.start()
            measured = run.session.planned_from
            steps = max(steps, run.steps)
            while run.steps < steps:  # the first has measured; all are to end with the same bits
                run.step_s()
        for name in runs.keys() & {"serial", "local"}:
            runs[name].start()
        ranks = TorchRanks(options.group, len(devices), microbatches) if options.torch else None
        try:
            theirs = {} if ranks is None else ranks.runs()
            for one in theirs.values():
                one.start()
            times = self.rounds(runs | theirs, lambda run: [run.step_s()])
        finally:
            if ranks is not None:
                ranks.close()
        return self._found(runs, times) | ({} if ranks is None else {"torch": ranks.version})

    def _found(self, runs: dict[str, Any], times: dict[str, list[float]]) -> dict[str, Any]:
        slower = self._slower(runs, times)
        found = {
            name: self._of(name, run, times[name], slower)
            for name, run in runs.items()
            if isinstance(run, Scheduled)
        }
        for name, run in runs.items():
            if isinstance(run, Scheduled):
                found[name]["bits"] = run.finish()
        return {
            "devices": len(self.cluster.devices),
            "times": times,
            "slower": dataclasses.asdict(slower),
            "link": dataclasses.asdict(self.link),
            "schedules": found,
        }

    def _slower(self, runs: dict[str, Any], times: dict[str, list[float]]) -> Slower:
        """The controls beside the plan."""
        if "local" not in runs:
            return Slower(1.0, 1.0)
        planned = next(run for run in runs.values() if isinstance(run, Scheduled))
        work_s = planned.report.pipeline["serial_step_s"] - self._sums_s(planned)
        serial_s, local_s = (statistics.median(times[name]) for name in ("serial", "local"))
        return Slower(float(serial_s / work_s), float(local_s * len(self.cluster.devices) / work_s))

    def _sums_s(self, run: Scheduled) -> float:
        """Seconds that the plan counts for adding up gradients, which the local control does not."""
        step, table = run.session.planned_from
        in_plan = {name for name in step.known.graph.ops if name in step.sums}
        here_s = sum(table.op_seconds.get(name, 0.0) for name in in_plan)
        return float(step.count * here_s / self.options.cores)

    def _predicted(self, run: Scheduled, slower: Slower) -> tuple[Timeline, list[LayerCosts]]:
        """The schedule, and its stages' costs, with as many workers computing as it keeps busy."""
        rows = run.report.pipeline["stages"]
        together = simulate(run.report.planned, stage_costs(rows, slower.together), self.link)
        costs = stage_costs(rows, slower.when_busy(1 - together.bubble_fraction))
        return simulate(run.report.planned, costs, self.link), costs

    def _of(self, name: str, run: Scheduled, seconds: list[float], slower: Slower) -> dict[str, Any]:
        from tf_ooo.modes.pipeline import tasks_of  # noqa: PLC0415 - imports TensorFlow

        report = run.report
        predicted, costs = self._predicted(run, slower)
        tasks = tasks_of(report.rewritten_graph)
        addresses = self.options.cluster.split(",")
        events = traced(run.step_s, addresses, statistics.median(seconds))
        times = task_times(events, tasks)
        busy = busy_seconds(events, tasks, addresses)
        timeline = measured_timeline(report.planned, times, busy)
        if self.options.pictures:
            self._draw(name, predicted, timeline)
        return {
            "schedule": report.schedule,
            "predicted_step_s": predicted.makespan_s,
            "predicted_bubble_fraction": predicted.bubble_fraction,
            "bubble_fraction": timeline.bubble_fraction,
            "bubble_fraction_by_device": [1 - busy_s / timeline.makespan_s for busy_s in busy],
            "planned_step_s": report.predicted_step_s,
            "peak_bytes": report.pipeline["predicted_peak_bytes"],
            "measured_peak_bytes": self._peak_bytes(run),
            "tasks_seen": len(times) / max(1, len(report.planned.tasks)),
            "tasks": task_seconds(times, costs),
            "plan": report.planned.to_text(),
            "stages": report.pipeline["stages"],
            "work_s": report.pipeline["serial_step_s"],
        }

    def _peak_bytes(self, run: Scheduled) -> list[int]:
        """Of each device: what stands there between steps, as planned, and what a step adds, measured."""
        processes = [int(process) for process in self.options.processes.split(",")]
        added = step_bytes(processes, self.options.memory, run.step_s)
        standing = dict.fromkeys(self.cluster.devices, 0.0)
        for stage in run.report.pipeline["stages"]:
            standing[stage["device"]] += stage["weight_bytes"] + stage["slot_bytes"]
        return [round(standing[name]) + more for name, more in zip(self.cluster.devices, added, strict=True)]

    def _draw(self, name: str, predicted: Any, measured: Any) -> None:
        stem = Path(self.options.pictures) / (
            f"{self.options.workload}_{len(self.cluster.devices)}x{self.options.microbatches}_{name}"
        )
        stem.parent.mkdir(parents=True, exist_ok=True)
        measured.save_png(f"{stem}.png")
        predicted.save_html(f"{stem}.html", measured)


def stage_costs(rows: Sequence[dict[str, Any]], slower: float) -> list[LayerCosts]:
    """The costs of the stages as the report has them, on devices that are so many times slower."""
    kinds = {"F": "forward_s", "dO": "output_grad_s", "dW": "weight_grad_s", "U": "update_s"}
    stages = []
    for row in rows:
        seconds = {kinds[kind]: value for kind, value in row["seconds"].items()}
        sent = max(row["sends"].values(), default=0)
        costs = LayerCosts(
            **seconds,
            activation_bytes=row["activation_bytes"],
            weight_bytes=row["weight_bytes"],
            output_bytes=sent,
        )
        stages.append(slowed(costs, slower))
    return stages


if __name__ == "__main__":
    main()
