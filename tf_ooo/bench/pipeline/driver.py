"""The process that trains in the pipeline benchmark; started by ``tf-ooo bench pipeline``.

Its workers' computing threads have their share of the CPU; this process has none, it only waits.
All schedules take turns, step by step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tf_ooo.bench.pipeline.gantt import measured_timeline, task_seconds, traced
from tf_ooo.bench.pipeline.pytorch import TorchRanks
from tf_ooo.bench.pipeline.rows import BASELINE, LOCAL, SERIAL, UNFUSED, PipelineMeasured, PipelineRun
from tf_ooo.bench.shared.cluster import ConfinedCluster, of_stages, stage_costs
from tf_ooo.bench.shared.drivers import Workers
from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.scripts import network_of
from tf_ooo.bench.shared.steps import InTurn, Stock
from tf_ooo.bench.shared.worker import step_bytes
from tf_ooo.bench.shared.workloads import PIPELINE, make
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.fit.ran import busy_seconds, task_times
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.table import Pipeline
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Slower:
    """How many times slower a worker computes than planned: ``alone``, and when all do (``together``)."""

    alone: float
    together: float

    def when_busy(self, share: float) -> float:
        """With so large a share of the rest computing at a time."""
        return self.alone + share * (self.together - self.alone)


class PipelineDriver:
    """One workload on one number of devices."""

    def __init__(self, workers: Workers, asked: PipelineRun) -> None:
        self._workers, self._asked, self._network = workers, asked, network_of(PIPELINE, asked.workload)
        self._cluster = ConfinedCluster(workers)

    def run(self) -> PipelineMeasured:
        """Times and reports of everything."""
        devices, version = len(self._cluster.devices), None
        controls, pipelines = self._controls(), self._pipelines()
        for control in controls.values():
            control.start()
        ours: dict[str, Stock | InTurn] = {**controls, **pipelines}
        runs: dict[str, Callable[[], float]] = {name: run.step_s for name, run in ours.items()}
        with contextlib.ExitStack() as stack:
            if self._asked.torch:
                ranks = TorchRanks(self._workers.group, devices, self._asked.microbatches)
                stack.enter_context(contextlib.closing(ranks))
                runs |= ranks.started()
                version = ranks.version
            times = self._cluster.times_s(runs)
        return {
            "devices": devices,
            "cores": self._workers.cores,
            "times": times,
            "runs": self._rows(pipelines, times),
            "torch": version,
        }

    def _controls(self) -> dict[str, Stock]:
        """The whole model on one worker, and where it can be divided equal parts of it on all of them."""
        devices, microbatches = self._cluster.devices, self._asked.microbatches
        controls = {SERIAL: Stock(partial(make, self._network, microbatches), devices[:1])}
        if microbatches % len(devices) == 0:
            controls[LOCAL] = Stock(partial(make, self._network, microbatches // len(devices)), devices)
        return controls

    def _pipelines(self) -> dict[str, InTurn]:
        """One for each schedule, all after equally many steps: all are to end with the same bits."""
        microbatches = self._asked.microbatches
        options = Pipeline(devices=self._cluster.slow_devices(), microbatches=microbatches, profile_steps=1)
        # All models first: making one sets the seed, upon which TensorFlow compiles all functions anew.
        workloads = {name: make(self._network, microbatches) for name in self._asked.schedules}
        pipelines: dict[str, InTurn] = {}
        measured, steps = None, 0
        for name, workload in workloads.items():
            fused = pipelines.get(name.removesuffix(UNFUSED)) if name.endswith(UNFUSED) else None
            schedule = name if fused is None else self._unfused(name, fused.schedule)
            pipeline = InTurn(workload, dataclasses.replace(options, schedule=schedule), measured)
            pipeline.start(2)
            pipelines[name], measured = pipeline, pipeline.measured
            steps = max(steps, pipeline.steps)
            while pipeline.steps < steps:  # only the first one has measured
                pipeline.step_s()
        return pipelines

    def _unfused(self, name: str, fused: Schedule) -> str:
        """A file with the same order, in which a dO is sent before the dW of its stage has run."""
        path = Path(self._workers.folder) / f"{name}.txt"
        path.write_text(dataclasses.replace(fused, fused_backward=False).to_text())
        return str(path)

    def _rows(self, pipelines: Mapping[str, InTurn], times: Mapping[str, list[float]]) -> dict[str, Row]:
        """What rows say of pipelines beside their times."""
        slower = self._slower(next(iter(pipelines.values())), times)
        rows = {name: self._row(name, run, times[name], slower) for name, run in pipelines.items()}
        bits = {name: run.finish() for name, run in pipelines.items()}
        return {
            name: row | {"bit_equal": bits[name] == bits.get(BASELINE, bits[name])}
            for name, row in rows.items()
        }

    def _slower(self, planned: InTurn, times: Mapping[str, list[float]]) -> Slower:
        """The controls beside the plan."""
        if LOCAL not in times:
            return Slower(1.0, 1.0)
        work_s = planned.report.pipeline["serial_step_s"] - self._sums_s(planned)
        serial_s, local_s = (statistics.median(times[name]) for name in (SERIAL, LOCAL))
        return Slower(float(serial_s / work_s), float(local_s * len(self._cluster.devices) / work_s))

    def _sums_s(self, planned: InTurn) -> float:
        """Seconds that the plan counts for adding up gradients, which the local control does not."""
        if planned.measured is None:
            return 0.0
        step, table = planned.measured
        in_plan = {name for name in step.known.graph.ops if name in step.sums}
        here_s = sum(table.op_seconds.get(name, 0.0) for name in in_plan)
        return float(step.count * here_s / self._workers.cores)

    def _predicted(self, pipeline: InTurn, slower: Slower) -> tuple[Timeline, list[LayerCosts]]:
        """The schedule, and its stages' costs, with as many workers computing as it keeps busy."""
        rows, link = pipeline.report.pipeline["stages"], self._cluster.link
        schedule = of_stages(pipeline.schedule)
        together = simulate(schedule, stage_costs(rows, slower.together), link)
        costs = stage_costs(rows, slower.when_busy(1 - together.bubble_fraction))
        return simulate(schedule, costs, link), costs

    def _row(self, name: str, pipeline: InTurn, seconds: list[float], slower: Slower) -> Row:
        report, schedule = pipeline.report, pipeline.schedule
        predicted, costs = self._predicted(pipeline, slower)
        tasks, addresses = tasks_of(report.rewritten_graph), self._workers.cluster.split(",")
        events = traced(pipeline.step_s, addresses, statistics.median(seconds))
        times = task_times(events, tasks)
        busy = busy_seconds(events, tasks, schedule)
        timeline = measured_timeline(schedule, times, busy)
        if self._asked.pictures:
            self._draw(name, predicted, timeline)
        return {
            "runs": report.schedule,
            "fused_backward": schedule.fused_backward,
            "losses": [pipeline.losses[0], pipeline.losses[-1]],
            "predicted_step_s": predicted.makespan_s,
            "bubble_fraction": timeline.bubble_fraction,
            "bubble_fraction_by_device": [1 - busy_s / timeline.makespan_s for busy_s in busy],
            "planned_step_s": report.predicted_step_s,
            "predicted_bubble_fraction": predicted.bubble_fraction,
            "peak_bytes": report.pipeline["predicted_peak_bytes"],
            "measured_peak_bytes": self._peak_bytes(pipeline),
            "link": dataclasses.asdict(self._cluster.link),
            "tasks_seen": len(times) / max(1, len(schedule.tasks)),
            "task_seconds": task_seconds(times, costs),
        }

    def _peak_bytes(self, pipeline: InTurn) -> list[int]:
        """Of each device: what stands there between steps, as planned, and what a step adds, measured."""
        added = step_bytes(self._workers.processes, self._workers.folder, pipeline.step_s)
        standing = dict.fromkeys(self._cluster.devices, 0.0)
        for stage in pipeline.report.pipeline["stages"]:
            standing[stage["device"]] += stage["weight_bytes"] + stage["slot_bytes"]
        return [round(there) + more for there, more in zip(standing.values(), added, strict=True)]

    def _draw(self, name: str, predicted: Timeline, measured: Timeline) -> None:
        shape = f"{len(self._cluster.devices)}x{self._asked.microbatches}"
        folder = Path(self._asked.pictures)
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{self._asked.workload}_{shape}_{name}"
        measured.save_png(f"{stem}.png")
        predicted.save_html(f"{stem}.html", measured)


if __name__ == "__main__":
    end_with(PipelineDriver(*requests(Workers, PipelineRun)).run())
