"""What the LayerPipe benchmark tells its driver, and what the driver has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict


@dataclass(frozen=True)
class LayerPipeRun:
    """A workload of :data:`tf_ooo.bench.layerpipe.networks.NETWORKS`, and schedules to train it with."""

    workload: str
    schedules: list[str]


class LayerPipeMeasured(TypedDict):
    """What a driver writes.

    ``times``: seconds of a step in each turn, by run; ``runs``: what else a row says of a schedule.
    """

    devices: int
    cores: float
    times: dict[str, list[float]]
    link: dict[str, float]
    runs: dict[str, dict[str, Any]]
