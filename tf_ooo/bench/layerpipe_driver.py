"""The process that trains in the LayerPipe benchmark; started by ``tf_ooo.bench.layerpipe``.

All modes take turns, some steps each: PipeDream and LayerPipe in rounds, fast_forward as the synchronous
pipeline, and the whole model on one worker.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from tf_ooo.bench import confine
from tf_ooo.bench.layerpipe_networks import make
from tf_ooo.bench.pipeline_driver import Devices, slowed
from tf_ooo.costs.layer_costs import Link
from tf_ooo.schedulers.layerpipe import weights_sent_bytes
from tf_ooo.simulator import simulate

# Name in the rows: mode, options.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast_forward": ("pipeline", {"schedule": "fast_forward", "microbatches": 4}),
    "pipedream": ("layerpipe", {"schedule": "pipedream"}),
    "layerpipe": ("layerpipe", {"schedule": "layerpipe"}),
    "layerpipe_ema": ("layerpipe", {"schedule": "layerpipe", "weights": "ema"}),
}
# So many steps follow each other in one turn, of which the first ones are not counted: what is on its way
# when another one runs has arrived when its own turn comes.
_TURN, _UNCOUNTED = 8, 2


def main() -> None:
    """Reads the command line, runs, writes what was found as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("cluster", "group", "processes", "workload", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cores", type=float, required=True)
    parser.add_argument("--repetitions", type=int, default=4)
    options = parser.parse_args()
    Path(options.out).write_text(json.dumps(Driver(options).run()))
    os._exit(0)


class InTurn:
    """The callback's steps, run without ``fit``."""

    def __init__(self, workload: Any, mode: str, options: dict[str, Any]) -> None:
        import tensorflow as tf

        import tf_ooo

        self.model, self.mode = workload.model, mode
        self.callback = tf_ooo.OOOBackprop(mode=mode, **options)
        self._iterator = iter(tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat())
        self.model.make_train_function()
        self.callback.set_model(self.model)
        self.callback.set_params({})
        self.callback.on_train_begin()

    @property
    def report(self) -> Any:
        """The callback's."""
        return self.callback.report

    def start(self, devices: int) -> None:
        """Runs until the model is distributed and all rounds are full."""
        while not (self.report.layerpipe.get("rounds") or self.report.rewritten_graph is not None):
            self._step()
        for _ in range(2 * devices + 2):
            self._step()

    def turn_s(self) -> list[float]:
        """Seconds of each step of a turn."""
        seconds = []
        for _ in range(_TURN):
            started = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - started)
        return seconds[_UNCOUNTED:]

    def _step(self) -> None:
        self.model.train_function(self._iterator)

    def finish(self) -> None:
        """Puts the model back together."""
        self.callback.on_train_end()


class Driver:
    """One workload on one number of workers."""

    def __init__(self, options: argparse.Namespace) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(4)
        confine.leave_free(options.group, os.getpid())
        from tf_ooo.pipeline.cluster import connect  # noqa: PLC0415 - threads first

        self.options = options
        self.cluster = connect(options.cluster)
        self._confine()

    def _confine(self) -> None:
        for rank, process in enumerate(self.options.processes.split(",")):
            confine.enter_computing(self.options.group, rank, int(process))

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
        for name, (mode, arguments) in RUNS.items():
            runs[name] = InTurn(make(self.options.workload), mode, {"devices": given[mode], **arguments})
        for run in runs.values():
            run.start(devices)
        self._confine()  # threads that have come since
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.options.repetitions):
            for name, run in runs.items():
                times[name] += run.turn_s()
        link = given["layerpipe"].link
        found = {name: self._of(run, link) for name, run in runs.items() if name in RUNS}
        for run in runs.values():
            run.finish()
        return {"devices": devices, "times": times, "runs": found, "link": dataclasses.asdict(link)}

    def _devices(self) -> Devices:
        return Devices(self.cluster, self.cluster.link or Link(), 1 / self.options.cores)

    def _of(self, run: InTurn, link: Link) -> dict[str, Any]:
        report = run.report
        found = {
            "schedule": report.schedule,
            "predicted_step_s": report.predicted_step_s,
            "plan": report.planned.to_text(),
            "peak_bytes": report.predicted_peak_bytes,
        }
        if run.mode == "layerpipe":
            serial = [slowed(layer, 1.0) for layer in report.costs.layers]
            timeline = simulate(report.planned, serial, link)
            sent = timeline.message_bytes / report.planned.microbatches
            found |= {
                "sent_bytes": sent + weights_sent_bytes(report.planned, report.costs.layers),
                "work_s": report.layerpipe["serial_step_s"],
                "delay_steps": report.layerpipe["delay_steps"],
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
