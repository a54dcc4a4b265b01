"""What the log of waits says about steps: whether the order was kept, and what the runtime itself took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.emulated.waiting import NAME_BYTES
from tf_ooo.planning.model.schedule import Schedule, Task

# A stage's F, dO or dW in one micro-batch; B is dO and dW, where a stage sends its dO only after its dW.
_Part = tuple[str, int, int]
# Clocks are read one after the other.
_LEAST_S = 1e-6


@dataclass
class Observed:
    """What was seen in all steps so far.

    Attributes:
        task_s: from the end of a task to the start of the next one on its device.
        message_s: from the end of a task to the start of one on another device that waited for it.
        step_s: of each step, all but the time from its first task to the end of its last one.
        violations: tasks that began before the one in front of them had ended, records of no task, and
            devices that ran another's tasks.
        pairs: neighbours that were looked at.
    """

    task_s: list[float] = field(default_factory=list)
    message_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    violations: int = 0
    pairs: int = 0

    def add(self, took_s: float, schedule: Schedule, tasks: Mapping[str, Task], records: np.ndarray) -> None:
        """Look at the records of one step; ``tasks``: of each op, by its name."""
        self.step_s.append(took_s - float(records["end"].max() - records["start"].min()))
        known = {name.encode()[1 - NAME_BYTES :]: _part(task, schedule) for name, task in tasks.items()}
        self.violations += sum(record["name"] not in known for record in records)
        spans: dict[_Part, tuple[float, float]] = {}
        lane_of = {_part(task, schedule): lane for lane, tasks in schedule.lanes.items() for task in tasks}
        places = set()
        for record in records:
            part = known.get(record["name"])
            if part is not None:
                start, end = spans.get(part, (np.inf, 0.0))
                spans[part] = min(start, float(record["start"])), max(end, float(record["end"]))
                places.add((lane_of[part], record["device"]))
        self.violations += len(places) - len(schedule.lanes)
        for lane in schedule.lanes.values():
            parts = [part for part in dict.fromkeys(_part(task, schedule) for task in lane) if part in spans]
            for before, part in zip([None, *parts], parts, strict=False):
                self._look_at(part, before and spans[before][1], lane_of, spans)

    def _look_at(
        self,
        part: _Part,
        before_s: float | None,
        lane_of: Mapping[_Part, object],
        spans: Mapping[_Part, tuple[float, float]],
    ) -> None:
        kind, stage, microbatch = part
        start_s, source = spans[part][0], (kind, stage + (-1 if kind == "F" else 1), microbatch)
        waits = kind != "dW" and source in spans and lane_of[source] != lane_of[part]
        if before_s is not None:
            self.pairs += 1
            self.violations += start_s < before_s - _LEAST_S
        if waits and (before_s is None or spans[source][1] > before_s):
            self.message_s.append(start_s - spans[source][1])
        elif before_s is not None:
            self.task_s.append(start_s - before_s)

    def to_dict(self) -> dict[str, Any]:
        """Return medians and 90th percentiles in microseconds, as JSON."""
        rows = {"task": self.task_s, "message": self.message_s, "step": self.step_s}
        said = {
            f"per_{name}_us": [round(float(value) * 1e6, 1) for value in np.percentile(seconds, [50, 90])]
            for name, seconds in rows.items()
            if seconds
        }
        return {**said, "violations": int(self.violations), "pairs": self.pairs}


def _part(task: Task, schedule: Schedule) -> _Part:
    fused = schedule.fused_backward and task.kind in ("dO", "dW")
    return "B" if fused else task.kind, task.stage, task.microbatch
