"""What the benchmark tells its driver, and what the driver has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True)
class PipelineRun:
    """One workload on the workers that there are.

    Attributes:
        workload: of :data:`tf_ooo.bench.shared.workloads.WORKLOADS`.
        microbatches: of a batch.
        schedules: names.
        pictures: folder for pictures; empty: none.
        torch: torch.distributed.pipelining takes turns with them.
    """

    workload: str
    microbatches: int
    schedules: list[str]
    pictures: str
    torch: bool


class ScheduleMeasured(TypedDict):
    """What there is to say of one schedule, beside its times; sizes of devices in their order."""

    schedule: str
    predicted_step_s: float
    predicted_bubble_fraction: float
    bubble_fraction: float
    bubble_fraction_by_device: list[float]
    planned_step_s: float | None
    peak_bytes: list[float]
    measured_peak_bytes: list[int]
    tasks_seen: float
    tasks: list[list[str | int | float]]
    bits: int


class PipelineMeasured(TypedDict):
    """What a driver writes.  ``times``: seconds of a step in each turn, by run; ``torch``: its version."""

    devices: int
    cores: float
    times: dict[str, list[float]]
    link: dict[str, float]
    schedules: dict[str, ScheduleMeasured]
    torch: str | None
