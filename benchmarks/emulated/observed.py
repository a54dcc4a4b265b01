"""The log of waits tells about steps: whether the order was kept, and what the runtime itself took."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_ooo.demo.waits import NAME_BYTES
from tf_ooo.planning.model.schedule import Schedule, Task

# A stage's F, dO or dW in one micro-batch; B is dO and dW, where a stage sends its dO only after its dW.
_Part = tuple[str, int, int]
# Clocks are read one after the other.
_LEAST_S = 1e-6


class Observed:
    """This was seen in all steps of a schedule so far; ``tasks``: of each op, by its name.

    ``gaps_s`` has seconds of a ``task``, from the end of one to the start of the next one on its device; of a
    ``message``, to the start of one on another device that waited for it; and of a ``step``, all of it but
    the time from its first task's start to its last one's end.  ``violations`` counts tasks that began before
    the one in front of them had ended, records of no task, and devices that ran another's tasks; ``pairs``
    the neighbours that were looked at.
    """

    def __init__(self, schedule: Schedule, tasks: Mapping[str, Task]) -> None:
        self._fused, self._device_of_stage = schedule.fused_backward, schedule.device_of_stage
        self._lanes = [dict.fromkeys(map(self._part, lane)) for lane in schedule.lanes.values()]
        self._lane_of = {part: number for number, lane in enumerate(self._lanes) for part in lane}
        self._tasks = {name.encode()[1 - NAME_BYTES :]: task for name, task in tasks.items()}
        self.gaps_s: dict[str, list[float]] = {"task": [], "message": [], "step": []}
        self.violations = self.pairs = 0
        self.turns: list[tuple[float, np.ndarray]] = []  # seconds and records of each step

    def _part(self, task: Task) -> _Part:
        fused = self._fused and task.kind in ("dO", "dW")
        return "B" if fused else task.kind, task.stage, task.microbatch

    def add(self, took_s: float, records: np.ndarray) -> None:
        """Look at the records of one step, which took so long."""
        self.turns.append((took_s, records))
        self.gaps_s["step"].append(took_s - float(records["end"].max() - records["start"].min()))
        spans, places = dict[_Part, tuple[float, float]](), set()
        for _, began, ended, device, name in records.tolist():
            if name not in self._tasks:
                self.violations += 1
                continue
            part = self._part(self._tasks[name])
            start, end = spans.get(part, (began, ended))
            spans[part] = min(start, began), max(end, ended)
            places.add((self._lane_of[part], device))
        self.violations += len(places) - len({lane for lane, _ in places})
        for lane in self._lanes:
            before_s = 0.0
            for part in lane:
                if part in spans:  # nothing waits in others
                    self._look_at(part, before_s, spans)
                    before_s = spans[part][1]

    def _look_at(self, part: _Part, before_s: float, spans: Mapping[_Part, tuple[float, float]]) -> None:
        (kind, stage, microbatch), start_s = part, spans[part][0]
        source = kind, stage + (-1 if kind == "F" else 1), microbatch
        far = kind != "dW" and source in spans and self._lane_of[source] != self._lane_of[part]
        sent_s = spans[source][1] if far else 0.0
        if before_s:
            self.pairs += 1
            self.violations += start_s < before_s - _LEAST_S
        if max(sent_s, before_s):
            self.gaps_s["message" if sent_s > before_s else "task"].append(start_s - max(sent_s, before_s))

    def median_turn(self) -> list[list[Any]]:
        """Return device, kind, stage, micro-batch, start and end of each task of the median step, as JSON."""
        _, records = sorted(self.turns, key=lambda turn: turn[0])[len(self.turns) // 2]
        began_s = records["start"].min()
        return [
            [self._device_of_stage[task.stage], task.kind, task.stage, task.microbatch]
            + [round(start_s - began_s, 6), round(end_s - began_s, 6)]
            for _, start_s, end_s, _, name in records.tolist()
            if (task := self._tasks.get(name))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return medians and 90th percentiles in microseconds, as JSON."""
        gaps = {
            f"per_{name}_us": [round(float(value) * 1e6, 1) for value in np.percentile(gaps_s, [50, 90])]
            for name, gaps_s in self.gaps_s.items()
            if gaps_s
        }
        return {**gaps, "violations": int(self.violations), "pairs": self.pairs}
