"""The process that trains in the LayerPipe benchmark; started by ``tf_ooo.bench.layerpipe.command``.

All modes take turns, some steps each: PipeDream, PipeDream-2BW and LayerPipe in rounds, fast_forward as the
synchronous pipeline, the whole model on one worker, and on every worker at once.
"""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from typing import Any

from tf_ooo.bench.layerpipe.networks import ROUNDS, make
from tf_ooo.bench.pipeline.driver import (
    ConfinedCluster,
    Devices,
    parser_of_driver,
    run_and_end,
    slowed,
    stage_costs,
)
from tf_ooo.bench.shared.runs import Steps, Stock
from tf_ooo.bench.shared.workloads import Workload
from tf_ooo.costs.layer_costs import Link
from tf_ooo.modes.layerpipe.fit import LayerPipeFit
from tf_ooo.modes.pipeline.fit import PipelineFit
from tf_ooo.modes.table import LayerPipe, Pipeline
from tf_ooo.planning.policies.layerpipe import weights_sent_bytes
from tf_ooo.planning.simulation.simulator import simulate

# Name in the rows: mode, options.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast_forward": ("pipeline", {"schedule": "fast_forward", "microbatches": 4}),
    "pipedream": ("layerpipe", {"schedule": "pipedream"}),
    # As many batches for an update as two versions of the weights do for with up to five workers.
    "pipedream_2bw": ("layerpipe", {"schedule": "pipedream_2bw", "accumulate_steps": 8}),
    "layerpipe": ("layerpipe", {"schedule": "layerpipe"}),
    "layerpipe_ema": ("layerpipe", {"schedule": "layerpipe", "weights": "ema"}),
}
# Steps of a turn that are timed together, after as many that are not: several rounds may run as one, and
# then the results of several steps come at once.
_TURN = 8
_DELAYS = ("delay_steps", "delay_updates", "gradient_sum_bytes")
ALL_ALONE = "all alone"


def main() -> None:
    """Reads the command line, runs, writes what was found as JSON."""
    parser = parser_of_driver()
    parser.add_argument("--schedules", required=True)
    run_and_end(Driver, parser.parse_args())


class InTurn(Steps):
    """A mode's steps, run without ``fit``."""

    def __init__(self, workload: Workload, mode: str, options: dict[str, Any]) -> None:
        self.mode = mode
        late = mode == LayerPipe.mode
        session = LayerPipeFit(LayerPipe(**options)) if late else PipelineFit(Pipeline(**options))
        super().__init__(workload, session)

    def start(self, devices: int) -> None:
        """Runs until the model is distributed and all rounds are full."""
        while not (self.report.layerpipe.get("rounds") or self.report.rewritten_graph is not None):
            self.step_s()
        for _ in range(2 * devices + 2):
            self.step_s()


def turn_s(run: Any) -> list[float]:
    """The mean seconds of a step in a turn; what has rounds fills them first."""
    for _ in range(_TURN if isinstance(run, InTurn) else 0):
        run.step_s()
    return [float(sum(run.step_s() for _ in range(_TURN)) / _TURN)]


class Driver(ConfinedCluster):
    """One workload on one number of workers."""

    def run(self) -> dict[str, Any]:
        """Times and reports of everything."""
        devices = len(self.cluster.devices)
        one = self._devices()
        one.devices = self.cluster.devices[:1]
        # Costs of a micro-batch are not those of a batch.
        given = {"pipeline": self._devices(), "layerpipe": self._devices()}
        runs = {
            "serial": InTurn(make(self.options.workload), "pipeline", {"devices": one, "microbatches": 1})
        }
        for name, (mode, arguments) in self._chosen().items():
            runs[name] = InTurn(make(self.options.workload), mode, {"devices": given[mode], **arguments})
        for run in runs.values():
            run.start(devices)
        all_alone = Stock(partial(make, self.options.workload), self.cluster.devices)
        all_alone.start()
        times = self.rounds({**runs, ALL_ALONE: all_alone}, turn_s)
        link = given["layerpipe"].link
        alone_s = statistics.median(times[ALL_ALONE])
        found = {name: self._of(run, link, alone_s) for name, run in runs.items() if name in RUNS}
        for run in runs.values():
            run.finish()
        return {"devices": devices, "times": times, "runs": found, "link": dataclasses.asdict(link)}

    def _chosen(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The modes that were asked for; of large networks fewer rounds are one function."""
        rounds = ROUNDS[self.options.workload]
        names = self.options.schedules.split(",")
        return {
            name: (mode, options | ({"unroll": rounds} if mode == "layerpipe" else {}))
            for name, (mode, options) in RUNS.items()
            if name in names
        }

    def _devices(self) -> Devices:
        return Devices(self.cluster, self.link, 1 / self.options.cores)

    def _of(self, run: InTurn, link: Link, alone_s: float) -> dict[str, Any]:
        """``alone_s``: of the whole step on each worker while all compute, to correct the costs by."""
        report = run.report
        rounds = run.mode == "layerpipe"
        slower = alone_s / (report.layerpipe or report.pipeline)["serial_step_s"]
        costs = report.costs.layers if rounds else stage_costs(report.pipeline["stages"], 1.0)
        predicted = simulate(report.planned, [slowed(one, slower) for one in costs], link)
        found = {
            "schedule": report.schedule,
            "predicted_step_s": predicted.steady_step_s if rounds else predicted.makespan_s,
            "planned_step_s": report.predicted_step_s,
            "plan": report.planned.to_text(),
            "peak_bytes": report.predicted_peak_bytes,
        }
        if rounds:
            sent = predicted.message_bytes / report.planned.microbatches
            found |= {
                "sent_bytes": sent + weights_sent_bytes(report.planned, report.costs.layers),
                "work_s": report.layerpipe["serial_step_s"],
                **{key: report.layerpipe[key] for key in _DELAYS if key in report.layerpipe},
                "weight_version_bytes": report.layerpipe["weight_version_bytes"],
                "notes": report.notes,
                "tasks": [
                    {kind: row[f"{kind}_processor"] for kind in ("F", "dO", "dW")} | {"layer": row["name"]}
                    for row in report.layers
                ],
            }
        return found


if __name__ == "__main__":
    main()
