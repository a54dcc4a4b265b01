"""The process that trains in the LayerPipe benchmark; started by ``tf-ooo bench layerpipe``.

All modes take turns, some steps each: PipeDream, PipeDream-2BW and LayerPipe in rounds, fast_forward as the
synchronous pipeline, the whole model on one worker, and on every worker at once.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial

from tf_ooo.bench.layerpipe.rows import LayerPipeRun
from tf_ooo.bench.shared.cluster import ConfinedCluster, of_stages, stage_costs
from tf_ooo.bench.shared.drivers import Measured, Workers
from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.steps import InTurn, Stock
from tf_ooo.bench.shared.workloads import LAYERPIPE, make
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.modes.table import LayerPipe, Pipeline
from tf_ooo.planning.policies.layerpipe import weights_sent_bytes
from tf_ooo.planning.simulation.simulator import simulate

# By name in the rows.
RUNS: dict[str, Pipeline | LayerPipe] = {
    "fast_forward": Pipeline(schedule="fast_forward", microbatches=4),
    "pipedream": LayerPipe(schedule="pipedream"),
    # As many batches for an update as two versions of the weights do for with up to five workers.
    "pipedream_2bw": LayerPipe(schedule="pipedream_2bw", accumulate_steps=8),
    "layerpipe": LayerPipe(schedule="layerpipe"),
    "layerpipe_ema": LayerPipe(schedule="layerpipe", weights="ema"),
}
# Steps of a turn that are timed together, after as many that are not: several rounds may run as one, and
# then the results of several steps come at once.
_TURN = 8
_DELAYS = ("delay_steps", "delay_updates", "gradient_sum_bytes")
_ALL_ALONE = "all alone"
# In one function; tracing eight of a deep network takes longer than measuring it.
_ROUNDS = {"mlp": 8, "mlp_square": 8, "vgg16": 4, "resnet18": 4, "resnet50": 2}


def turn_s(run: InTurn | Stock) -> float:
    """The mean seconds of a step in a turn; what has rounds fills them first."""
    for _ in range(_TURN if isinstance(run, InTurn) else 0):
        run.step_s()
    return sum(run.step_s() for _ in range(_TURN)) / _TURN


class LayerPipeDriver:
    """One workload on one number of workers."""

    def __init__(self, workers: Workers, asked: LayerPipeRun) -> None:
        self._asked, self._cores = asked, workers.cores
        self._make = partial(make, LAYERPIPE[asked.workload])
        self._cluster = ConfinedCluster(workers)

    def run(self) -> Measured:
        """Times and reports of everything."""
        devices, runs = self._cluster.devices, self._runs()
        for run in runs.values():
            run.start(2 * len(devices) + 2)  # all rounds are full
        all_alone = Stock(self._make, devices)
        all_alone.start()
        turns: dict[str, Callable[[], float]] = {name: partial(turn_s, run) for name, run in runs.items()}
        times = self._cluster.times_s({**turns, _ALL_ALONE: partial(turn_s, all_alone)})
        alone_s = statistics.median(times[_ALL_ALONE])
        rows = {name: self._row(run, alone_s) for name, run in runs.items() if name in RUNS}
        for run in runs.values():
            run.finish()
        return {"devices": len(devices), "cores": self._cores, "times": times, "runs": rows}

    def _runs(self) -> dict[str, InTurn]:
        """The whole model on one worker, and the modes that were asked for."""
        serial = Pipeline(devices=self._cluster.slow_devices(1), microbatches=1)
        runs = {"serial": InTurn(self._make(), serial)}
        # Costs of a micro-batch are not those of a batch.
        devices = {mode: self._cluster.slow_devices() for mode in (Pipeline, LayerPipe)}
        for name, options in RUNS.items():
            if name not in self._asked.schedules:
                continue
            options = dataclasses.replace(options, devices=devices[type(options)])
            if isinstance(options, LayerPipe):  # of large networks fewer rounds are one function
                options = dataclasses.replace(options, unroll=_ROUNDS[self._asked.workload])
            runs[name] = InTurn(self._make(), options)
        return runs

    def _row(self, run: InTurn, alone_s: float) -> Row:
        """What a row says beside its times; costs are corrected by ``alone_s``, of the whole step on each
        worker while all compute."""
        report, schedule, link = run.report, run.schedule, self._cluster.link
        slower = alone_s / (report.layerpipe or report.pipeline)["serial_step_s"]
        row: Row = {
            "planned_step_s": report.predicted_step_s,
            "plan": schedule.to_text(),
            "peak_bytes": report.predicted_peak_bytes,
            "link": dataclasses.asdict(link),
        }
        if report.mode == "pipeline":
            costs = stage_costs(report.pipeline["stages"], slower)
            predicted = simulate(of_stages(schedule), costs, link)
            return {**row, "mode": "pipeline", "predicted_step_s": predicted.makespan_s}
        layers: tuple[LayerCosts, ...] = () if report.costs is None else report.costs.layers
        predicted = simulate(schedule, [layer.slowed(slower) for layer in layers], link)
        sent_bytes = predicted.message_bytes / schedule.microbatches + weights_sent_bytes(schedule, layers)
        return {
            **row,
            "mode": "layerpipe",
            "predicted_step_s": predicted.steady_step_s,
            "sent_bytes": sent_bytes,
            "work_s": report.layerpipe["serial_step_s"],
            **{key: report.layerpipe[key] for key in _DELAYS if key in report.layerpipe},
            "weight_version_bytes": report.layerpipe["weight_version_bytes"],
            "notes": report.notes,
            "tasks": [
                {kind: layer[f"{kind}_processor"] for kind in ("F", "dO", "dW")} | {"layer": layer["name"]}
                for layer in report.layers
            ],
        }


if __name__ == "__main__":
    end_with(LayerPipeDriver(*requests(Workers, LayerPipeRun)).run())
