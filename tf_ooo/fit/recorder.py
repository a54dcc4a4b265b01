"""Records a few steps of a fit with TensorFlow's profiler: what really ran, beside the plan."""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tf_ooo.fit.task_times import busy_seconds, last_execution, task_times
from tf_ooo.fit.traced import Traced, run_traced
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.measured import (
    against_plan,
    between_neighbours,
    measured_timeline,
    one_by_one,
)
from tf_ooo.report.parts import Recorded
from tf_ooo.report.report import Report

_LOG = logging.getLogger("tf_ooo")
# So many of the first fifty executions are recorded: later the executor makes no events of cheap ops.
STEPS = 3
_DEDUCED = (
    "the profiler does not see communication: it is drawn from the end of the weight gradient to the begin "
    "of the update"
)


@dataclass(frozen=True)
class Watched:
    """Describes what runs now, for a profile to be read.

    Attributes:
        schedule: as planned.
        tasks: gives the task of each op, by its name.
        timed: seconds of steps that the mode collects; those of recorded steps are taken out again.
        why: why the order that runs is not the plan's, where that is known.
        why_not: why no task can be seen; then only the raw profile is written.
        addresses: of workers, which this process' profiler does not see.
        one_by_one: the plan is an order, without seconds; its tasks are drawn in those that were measured.
        late_gradients: they are an earlier batch's, and may run before a forward pass.
    """

    schedule: Schedule
    tasks: Callable[[], Mapping[str, Task]]
    timed: deque[float] = field(default_factory=deque)
    why: str = ""
    why_not: str = ""
    addresses: Sequence[str] = ()
    one_by_one: bool = False
    late_gradients: bool = False


class Recorder:
    """Stands in the place of a training's ``run``.

    Args:
        run: one execution of the training.
        watched: what runs; None as long as the plan does not run yet.
        report: gives the report that is filled in.
        folder: where ``plugins/profile`` goes, for TensorBoard.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        watched: Callable[[], Watched | None],
        report: Callable[[], Report],
        folder: str | os.PathLike[str],
    ) -> None:
        self._run, self._watched, self._report, self._folder = run, watched, report, folder
        self._records: list[Traced] = []
        self._last: Watched | None = None
        self._ended = False

    def run(self, given: Any) -> Any:
        """Return one execution, recorded if it is one of the first of the plan."""
        watched = None if self._ended else self._watched()
        if watched is None:
            return self._run(given)
        self._last = watched
        outputs = self._recorded(given, watched)
        # Workers are asked for a second each time.
        if len(self._records) >= (1 if watched.addresses else STEPS):
            self.close()
        return outputs

    def _recorded(self, iterator: object, watched: Watched) -> Any:
        before = list(watched.timed)
        try:
            expected_s = max(before, default=1.0)
            traced = run_traced(lambda: self._run(iterator), watched.addresses, expected_s)
        finally:
            watched.timed.clear()
            watched.timed.extend(before)
        if traced.failed:
            self._give_up(traced.failed)
        else:
            self._records.append(traced)
        return traced.outputs

    def _give_up(self, reason: str) -> None:
        self._ended = True
        self._say(reason)
        _LOG.warning("no timeline is measured: %s", reason)

    def close(self) -> None:
        """Fills in the report with what was recorded; does nothing the second time."""
        if self._ended:
            return
        self._ended = True
        if self._last is None or not self._records:
            report = self._report()
            if report.measured_timeline is None and not report.not_measured:
                self._say(report.fallback_reason or "training ended before the plan ran")
            return
        records, self._records = sorted(self._records, key=lambda record: record.seconds), []
        try:
            self._fill(self._last, records)
        except Exception as error:  # a picture must not end a training
            _LOG.debug("no measured timeline", exc_info=True)
            self._say(f"the profile could not be read: {type(error).__name__}: {error}")

    def _say(self, why_not: str) -> None:
        report = self._report()
        report.change(not_measured=why_not)

    def _fill(self, watched: Watched, records: Sequence[Traced]) -> None:
        """Fill the report from the execution of median seconds, among those in which tasks ran."""
        report = self._report()
        self._write(records[len(records) // 2].files)
        if watched.why_not:
            self._say(watched.why_not)
            return
        tasks = watched.tasks()
        seen = [list(itertools.chain.from_iterable(record.events.values())) for record in records]
        with_tasks = [events for events in (last_execution(each, tasks) for each in seen) if events]
        if not with_tasks:
            self._say("the profile has no op of the plan in it")
            return
        events = with_tasks[len(with_tasks) // 2]
        ran = task_times(events, tasks, watched.late_gradients)
        constant = {tasks[event.label.partition(":")[0]] for event in events} - ran.keys()
        deduced = between_neighbours(ran, set(tasks.values()) - ran.keys())
        ran |= deduced
        busy_s = busy_seconds(events, tasks, watched.schedule)
        measured = measured_timeline(watched.schedule, ran, busy_s)
        if watched.one_by_one and report.timeline is None:
            seconds = {task: each.ops_s for task, each in ran.items()}
            report.change(timeline=one_by_one(watched.schedule, seconds))
        planned = None if watched.one_by_one else report.timeline
        differs = against_plan(
            watched.schedule, measured, planned, report.task_name, watched.why, set(tasks.values()) - constant
        )
        report.put(Recorded(measured, [*differs, _DEDUCED] if deduced else differs))

    def _write(self, files: Mapping[str, bytes]) -> None:
        """Write the profile where TensorBoard looks for it; a folder that cannot be written is logged."""
        try:
            for name, content in files.items():
                path = Path(self._folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        except OSError as error:
            _LOG.warning("the profile was not written: %s", error)
