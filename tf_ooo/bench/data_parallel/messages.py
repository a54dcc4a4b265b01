"""What the data parallel benchmark tells its workers, and what rank 0 has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

# Name: what the callback is given; None: without tf_ooo.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "horovod": None,
    "horovod_tape": None,
    "local": None,
    "in_order": {"schedule": "in_order", "profile_steps": 0},
    "k=0": {"schedule": "reverse_first_k", "k": 0, "profile_steps": 0},
    "reverse_first_k": {"schedule": "reverse_first_k", "profile_steps": 0},
    "search": {"schedule": "search", "profile_steps": 0},
    "auto": {"profile_steps": 2},
}


@dataclass(frozen=True)
class DataParallelRun:
    """What all workers of a run train.

    Attributes:
        workload: of :data:`tf_ooo.bench.shared.networks.NETWORKS`.
        configurations: of :data:`CONFIGURATIONS`; they take turns.
        steps: of one execution.
        repetitions: turns.
        rows: of each worker's batch; 0: the workload's.
        group: prefix of the CPU groups of :func:`tf_ooo.bench.shared.confine.shares`.
        out: file for what rank 0 has measured.
    """

    workload: str
    configurations: list[str]
    steps: int
    repetitions: int
    rows: int
    group: str
    out: str


class _Timed(TypedDict):
    seconds: list[float]
    bits: int


class ConfigurationMeasured(_Timed, total=False):
    """Seconds of a step in each turn, a check sum of the weights; where we took part what was planned."""

    schedule: str
    reason: str
    predicted_step_s: float | None
    plan: str | None
    knobs: dict[str, str]


class DataParallelMeasured(TypedDict):
    """By configuration; ``communication_s``: of one message as large as all gradients together."""

    configurations: dict[str, ConfigurationMeasured]
    communication_s: float
    workers: int
