"""Measures a network of the paper on this machine, stock in turns: rows as of the benchmark of each mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tf_ooo.bench.data_parallel import running
from tf_ooo.bench.data_parallel.rows import BASELINE, LOCAL, SAME_STEPS, DataParallelRun
from tf_ooo.bench.paper import single
from tf_ooo.bench.paper.networks import DATA_PARALLEL, PIPELINE, SINGLE, PaperNetwork
from tf_ooo.bench.pipeline.rows import PipelineRun, rows_of
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.drivers import run_driver
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.scripts import ScriptNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

# Communication takes as long as computing.
_COMMUNICATION = 1.0
# Stock with one step and with as many as ours, computing alone, the paper's order searched for, and what a
# user gets: the faster of stock and ours.
_DATA_PARALLEL = (BASELINE, SAME_STEPS[0], LOCAL, "search", "auto")
_PIPELINE = ("gpipe", "fast_forward", "modulo", "zb_h1")


@dataclass(frozen=True)
class Effort:
    """How much is measured at a size: steps of each way in turns, turns, steps of one execution, devices and
    micro-batches."""

    steps: int
    turns: int
    together: int
    devices: int
    microbatches: int


EFFORTS = {"tiny": Effort(10, 3, 2, 2, 4), "small": Effort(20, 5, 4, 2, 4), "full": Effort(30, 8, 8, 4, 8)}


@dataclass(frozen=True)
class Asked:
    """A network, how large it is to be, where its data are to be from, its script's folder and what is
    changed of its settings."""

    network: PaperNetwork
    size: str
    source: str
    examples: Path
    settings: Mapping[str, Any]

    def workload(self) -> ScriptNetwork:
        """OptionsError where its script is not there or takes no such setting."""
        script = str(self.examples / f"{self.network.script}.py")
        settings = self.network.settings_at(self.size, self.settings)
        workload = ScriptNetwork(script, self.size, self.source, settings)
        workload.given()
        return workload

    def effort(self, mode: str) -> Effort:
        """That of its size; at ``full`` the published devices and micro-batches, where each device can have
        a core of this machine."""
        of_size, runs = EFFORTS[self.size], self.network.runs_with(self.settings, mode)
        if self.size != "full" or not runs or runs[0].devices > confine.own_cores():
            return of_size
        return replace(of_size, devices=runs[0].devices, microbatches=runs[0].microbatches)


def rows(asked: Asked, mode: str) -> list[Row]:
    """One for each schedule; none where this machine cannot be confined, which is said."""
    workload = asked.workload()
    if mode != SINGLE and confine.skipped(with_link=mode == DATA_PARALLEL):
        return []
    data, optimizer, began_s = workload.data_used(), workload.optimizer_text(), time.monotonic()
    measured = list(_MEASURED[mode](workload.label(), asked.effort(mode)))
    about: Row = {"kind": "measured", "network": asked.network.name, "size": asked.size, "mode": mode}
    about["settings"] = {key: value for key, value in vars(workload.given()).items() if key != "data"}
    about |= {"data": data, "optimizer": optimizer, "took_s": round(time.monotonic() - began_s, 1)}
    return [{**row, **about, "workload": asked.network.name} for row in measured]


def _single(label: str, effort: Effort) -> Iterator[Row]:
    row = single.measured(single.SingleRun(label, effort.steps))
    yield {**row, "baseline": "stock", "devices": 1}


def _data_parallel(label: str, effort: Effort) -> Iterator[Row]:
    workers = effort.devices
    cores = min(0.5, round(confine.own_cores() / (2 * workers), 2))
    run = DataParallelRun(label, list(_DATA_PARALLEL), 0.0, workers, cores, 0, effort.together, effort.turns)
    for on_link in running.on_links(run, [_COMMUNICATION]):
        yield from running.measured(on_link)


def _pipeline(label: str, effort: Effort) -> Iterator[Row]:
    asked = PipelineRun(label, effort.microbatches, list(_PIPELINE), "", False)
    driver = "tf_ooo.bench.pipeline.driver"
    yield from rows_of(run_driver(driver, asked, effort.devices, None, effort.turns), asked)


_MEASURED: dict[str, Callable[[str, Effort], Iterator[Row]]] = {
    SINGLE: _single,
    DATA_PARALLEL: _data_parallel,
    PIPELINE: _pipeline,
}
