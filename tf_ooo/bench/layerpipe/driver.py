"""The process that trains in the LayerPipe benchmark; started by ``tf-ooo bench layerpipe``.

All modes take turns, some steps each: PipeDream, PipeDream-2BW and LayerPipe in rounds, fast_forward as the
synchronous pipeline, the whole model on one worker, and on every worker at once.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from tf_ooo.bench.layerpipe.messages import LayerPipeMeasured, LayerPipeRun
from tf_ooo.bench.layerpipe.networks import ROUNDS, make
from tf_ooo.bench.shared.cluster import ConfinedCluster, write_and_end
from tf_ooo.bench.shared.drivers import Workers
from tf_ooo.bench.shared.processes import JsonOf
from tf_ooo.bench.shared.slow_devices import SlowDevices, slowed, stage_costs
from tf_ooo.bench.shared.steps import StepByStep, Stock
from tf_ooo.bench.shared.workloads import Workload
from tf_ooo.modes.table import LayerPipe, Pipeline, mode_for
from tf_ooo.planning.policies.layerpipe import weights_sent_bytes
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline

# Name in the rows: mode, options.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast_forward": ("pipeline", {"schedule": "fast_forward", "microbatches": 4}),
    "pipedream": ("layerpipe", {"schedule": "pipedream"}),
    # As many batches for an update as two versions of the weights do for with up to five workers.
    "pipedream_2bw": ("layerpipe", {"schedule": "pipedream_2bw", "accumulate_steps": 8}),
    "layerpipe": ("layerpipe", {"schedule": "layerpipe"}),
    "layerpipe_ema": ("layerpipe", {"schedule": "layerpipe", "weights": "ema"}),
}
OPTIONS = {"pipeline": Pipeline, "layerpipe": LayerPipe}
# Steps of a turn that are timed together, after as many that are not: several rounds may run as one, and
# then the results of several steps come at once.
_TURN = 8
_DELAYS = ("delay_steps", "delay_updates", "gradient_sum_bytes")
ALL_ALONE = "all alone"


@click.command()
@click.argument("workers", type=JsonOf(Workers))
@click.argument("asked", type=JsonOf(LayerPipeRun))
def main(workers: Workers, asked: LayerPipeRun) -> None:
    """Measures one workload on one number of devices; writes LayerPipeMeasured as JSON."""
    write_and_end(workers, LayerPipeDriver(workers, asked).run())


class InTurn:
    """A mode's steps, run without ``fit``."""

    def __init__(self, workload: Workload, mode: str, options: dict[str, Any]) -> None:
        self.mode = mode
        self.session = StepByStep(workload, mode_for(OPTIONS[mode](**options)))

    @property
    def distributed(self) -> bool:
        """Whether the model is."""
        report = self.session.report
        return bool(report.layerpipe.get("rounds")) or report.rewritten_graph is not None

    def start(self, devices: int) -> None:
        """Runs until the model is distributed and all rounds are full."""
        while not self.distributed:
            self.session.step_s()
        for _ in range(2 * devices + 2):
            self.session.step_s()

    def turn_s(self) -> list[float]:
        """The mean seconds of a step in a turn, after rounds have been filled."""
        for _ in range(_TURN):
            self.session.step_s()
        return _mean_s(self.session)


def _mean_s(run: StepByStep | Stock) -> list[float]:
    """The mean seconds of a step in a turn."""
    return [sum(run.step_s() for _ in range(_TURN)) / _TURN]


class LayerPipeDriver:
    """One workload on one number of workers."""

    def __init__(self, workers: Workers, asked: LayerPipeRun) -> None:
        self._asked, self._cores = asked, workers.cores
        self._cluster = ConfinedCluster(workers)

    def run(self) -> LayerPipeMeasured:
        """Times and reports of everything."""
        runs = self._runs()
        for run in runs.values():
            run.start(len(self._cluster.devices))
        all_alone = Stock(partial(make, self._asked.workload), self._cluster.devices)
        all_alone.start()
        turns: dict[str, Callable[[], list[float]]] = {name: run.turn_s for name, run in runs.items()}
        turns[ALL_ALONE] = partial(_mean_s, all_alone)
        times = self._cluster.turns(turns, lambda turn_s: turn_s())
        alone_s = statistics.median(times[ALL_ALONE])
        measured = {name: self._row(run, alone_s) for name, run in runs.items() if name in RUNS}
        for run in runs.values():
            run.session.finish()
        return {
            "devices": len(self._cluster.devices),
            "cores": self._cores,
            "times": times,
            "runs": measured,
            "link": dataclasses.asdict(self._cluster.link),
        }

    def _runs(self) -> dict[str, InTurn]:
        """The whole model on one worker, and the modes that were asked for."""
        # Costs of a micro-batch are not those of a batch.
        devices = {mode: self._devices() for mode in OPTIONS}
        serial = {"devices": self._devices(1), "microbatches": 1}
        runs = {"serial": InTurn(make(self._asked.workload), "pipeline", serial)}
        for name, (mode, options) in RUNS.items():
            if name in self._asked.schedules:
                # Of large networks fewer rounds are one function.
                rounds = {"unroll": ROUNDS[self._asked.workload]} if mode == "layerpipe" else {}
                given = {"devices": devices[mode], **options, **rounds}
                runs[name] = InTurn(make(self._asked.workload), mode, given)
        return runs

    def _devices(self, count: int | None = None) -> SlowDevices:
        return SlowDevices(self._cluster, 1 / self._cores, count)

    def _row(self, run: InTurn, alone_s: float) -> dict[str, Any]:
        """``alone_s``: of the whole step on each worker while all compute, to correct the costs by."""
        report, schedule = run.session.report, run.session.schedule
        rounds = run.mode == "layerpipe"
        slower = alone_s / (report.layerpipe or report.pipeline)["serial_step_s"]
        costs = run.session.layers if rounds else stage_costs(report.pipeline["stages"], 1.0)
        predicted = simulate(schedule, [slowed(layer, slower) for layer in costs], self._cluster.link)
        return {
            "predicted_step_s": predicted.steady_step_s if rounds else predicted.makespan_s,
            "planned_step_s": report.predicted_step_s,
            "plan": schedule.to_text(),
            "peak_bytes": report.predicted_peak_bytes,
            **(_of_rounds(run.session, predicted) if rounds else {}),
        }


def _of_rounds(session: StepByStep, predicted: Timeline) -> dict[str, Any]:
    """What a row says of rounds alone."""
    schedule, report = session.schedule, session.report
    sent = predicted.message_bytes / schedule.microbatches
    return {
        "sent_bytes": sent + weights_sent_bytes(schedule, session.layers),
        "work_s": report.layerpipe["serial_step_s"],
        **{key: report.layerpipe[key] for key in _DELAYS if key in report.layerpipe},
        "weight_version_bytes": report.layerpipe["weight_version_bytes"],
        "notes": report.notes,
        "tasks": [
            {kind: row[f"{kind}_processor"] for kind in ("F", "dO", "dW")} | {"layer": row["name"]}
            for row in report.layers
        ],
    }


if __name__ == "__main__":
    main()
