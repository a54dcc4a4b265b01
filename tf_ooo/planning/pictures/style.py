"""Defines what all pictures share: colours, names, and a timeline's tasks as columns to draw."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.schedule import Lane, Schedule
from tf_ooo.planning.model.task import KIND_NUMBER, KINDS, Fields, Floats, Ints

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import MessageColumns, Timeline


# The palette of Okabe and Ito, which readers with a colour vision deficiency can tell apart.
COLOURS = {"F": "#56B4E9", "dO": "#D55E00", "dW": "#0072B2", "U": "#009E73", "comm": "#CC79A7"}
MESSAGE_COLOUR = "#7F7F7F"
TEXT_COLOURS = {"F": "#000000", "dO": "#000000", "dW": "#FFFFFF", "U": "#000000", "comm": "#000000"}
NAMES = {
    "F": "F forward",
    "dO": "dO output gradient",
    "dW": "dW weight gradient",
    "U": "U update",
    "comm": "comm gradient exchange",
}
# One or two letters for where there is little room.
SHORT = {"F": "F", "dO": "o", "dW": "w", "U": "u", "comm": "c"}
_MOST_TO_REPEAT = 300_000
_STREAMS = {0: "main", 1: "sub"}
_ROLES = {"comm": "gradient exchange", "update": "updates"}
# The help of a chart explains these, as far as the chart has them.
_EXAMPLE_STAGE, _EXAMPLE_BATCH = 2, 3


def steady_step_s(timeline: Timeline) -> float | None:
    """Return the seconds of a repeated step; None where simulating several steps would take long."""
    known = timeline.steps > 1 or timeline.schedule.asynchronous
    return timeline.steady_step_s if known or timeline.start_s.size <= _MOST_TO_REPEAT else None


def lane_label(schedule: Schedule, lane: Lane) -> str:
    """Return ``device 3``, with the stream where the device has several."""
    device, stream = lane
    if sum(other == device for other, _ in schedule.lanes) == 1:
        return f"device {device}"
    tasks = schedule.lanes[lane]
    kinds = {task.kind for task in tasks[:1]} | {task.kind for task in tasks[-1:]}
    alone = kinds.pop() if len(kinds) == 1 else ""
    role = {"comm": "comm", "U": "update"}.get(alone) or _STREAMS.get(stream, f"stream {stream}")
    return f"device {device} {role}"


def stream_names(schedule: Schedule, lanes: Sequence[Lane], measured: bool = False) -> dict[Lane, str]:
    """Return a name for the purpose of each stream of a device; streams of equal purpose are numbered.

    In ``measured`` lanes only communication and updates are streams; the others hold tasks that ran side by
    side.
    """
    names: dict[Lane, str] = {}
    taken: Counter[tuple[int, str]] = Counter()
    for lane in lanes:
        device = lane[0]
        role = lane_label(schedule, lane).removeprefix(f"device {device}").strip()
        role = _ROLES.get(role, f"{role} stream" if role in _STREAMS.values() else role)
        name = role if role and not (measured and role not in _ROLES.values()) else "tasks"
        taken[device, name] += 1
        count = taken[device, name]
        names[lane] = name if count == 1 else f"{name} {count}"
    return names


def names_of_layers(places: Sequence[int], names: Mapping[int, str]) -> str:
    """Return ``dense``, or ``dense .. dense_3 (4 layers)``; for a layer without a name its number."""
    ends = [names.get(place, str(place)) for place in dict.fromkeys((places[0], places[-1]))]
    return " .. ".join(ends) + (f" ({len(places)} layers)" if len(places) > 1 else "")


def numbering(schedule: Schedule) -> str:
    """Say which numbers tell the tasks of one lane apart: ``stage``, ``microbatch`` or ``both``."""
    if schedule.microbatches == 1:
        return "stage"
    stages = (Fields.of(tasks.codes).stage for tasks in schedule.lanes.values())
    one_each = all(not len(stage) or stage.min() == stage.max() for stage in stages)
    return "microbatch" if one_each else "both"


def task_label(kind: str, stage: int, microbatch: int, which: str) -> str:
    """Return a task's label in as few letters as needed: ``F3``, or ``2F3`` for stage 2."""
    if which == "stage":
        return f"{SHORT[kind]}{stage}"
    return f"{stage if which == 'both' else ''}{SHORT[kind]}{microbatch}"


def labels_of(bars: Bars, schedule: Schedule) -> list[str]:
    """Return a label for each bar."""
    which, f = numbering(schedule), bars.fields
    rows = zip(f.kind.tolist(), f.stage.tolist(), f.microbatch.tolist(), strict=True)
    return [task_label(KINDS[kind], stage, batch, which) for kind, stage, batch in rows]


def what_a_stage_is(schedule: Schedule) -> str:
    """Say what a task's number counts: stages of several layers, or layers."""
    return "stage" if schedule.mode == "pipeline" or schedule.stages else "layer"


def numbers_text(schedule: Schedule) -> str:
    """Explain the letters and numbers in the boxes by an existing one."""
    stage_is, which = what_a_stage_is(schedule), numbering(schedule)
    kind, stage, batch = _example(schedule, which)
    counted = [f"{stage_is} {stage}"] if which != "microbatch" else []
    counted += [f"micro-batch {batch}"] if which != "stage" else []
    return f"{task_label(kind, stage, batch, which)}: {kind} of {', '.join(counted)}"


def _example(schedule: Schedule, which: str) -> tuple[str, int, int]:
    """Return kind, stage and micro-batch of an example: a dO if possible, with two different numbers."""
    fields = Fields.of(schedule.tasks.codes)
    there = [kind for kind in ("dO", "F", "dW") if (fields.kind == KIND_NUMBER[kind]).any()]
    if not there:
        return "dO", _EXAMPLE_BATCH, _EXAMPLE_BATCH
    chosen = fields.kind == KIND_NUMBER[there[0]]
    tasks = np.unique(np.stack([fields.stage[chosen], fields.microbatch[chosen]], axis=1), axis=0)
    wanted = _EXAMPLE_STAGE if which == "both" else _EXAMPLE_BATCH
    away = abs(tasks - (wanted, _EXAMPLE_BATCH))
    alike = (tasks[:, 0] == tasks[:, 1]) & (which == "both")
    counted = {"stage": away[:, 0], "microbatch": away[:, 1], "both": away.sum(axis=1)}[which]
    stage, batch = tasks[np.lexsort((counted, alike))[0]].tolist()
    return there[0], stage, batch


LOG = logging.getLogger("tf_ooo.pictures")
_CURVE_POINTS = 4000


@dataclass(frozen=True)
class View:
    """Says which part of a timeline is drawn: lanes, tasks before ``until_s``; ``note``: the rest."""

    lanes: Sequence[Lane]
    until_s: float
    note: str = ""

    @property
    def devices(self) -> list[int]:
        return sorted({device for device, _ in self.lanes})


@dataclass(frozen=True)
class Bars:
    """Holds columns, one row for each task and step; ``lane`` holds indices into the view's lanes."""

    lane: Ints
    start_s: Floats
    end_s: Floats
    step: Ints
    codes: Ints

    def __len__(self) -> int:
        return len(self.start_s)

    @cached_property
    def fields(self) -> Fields:
        return Fields.of(self.codes)

    def of_kind(self, number: int) -> Bars:
        """Return the tasks of one kind, by its place in KINDS."""
        rows = self.fields.kind == number
        columns = (self.lane, self.start_s, self.end_s, self.step, self.codes)
        return Bars(*(column[rows] for column in columns))


def view_of(timeline: Timeline, most_tasks: int, most_lanes: int) -> View:
    """Return all of the timeline if it fits; else evenly chosen devices, and of these the first seconds."""
    lanes = list(timeline.schedule.lanes)
    notes = []
    if len(lanes) > most_lanes:
        lanes = _some_devices(lanes, most_lanes)
        shown = len({device for device, _ in lanes})
        notes.append(f"{shown} of {timeline.schedule.devices} devices, evenly chosen")
    pieces = dict(timeline.lane_slices())
    starts = [timeline.start_s[:, pieces[lane]].ravel() for lane in lanes]
    start_s = np.concatenate([np.zeros(0), *starts])
    until_s = float("inf")
    if len(start_s) > most_tasks:
        until_s = float(np.partition(start_s, most_tasks)[most_tasks])
        notes.append(f"the first {until_s:.4g} of {timeline.makespan_s:.4g} seconds")
    if not notes:
        return View(lanes, until_s)
    drawn = int((start_s < until_s).sum())
    note = f"Only a part is shown: {', and '.join(notes)} ({drawn:,} of {timeline.start_s.size:,} tasks)."
    LOG.warning("%s", note)
    return View(lanes, until_s, note)


def _some_devices(lanes: Sequence[Lane], most_lanes: int) -> list[Lane]:
    devices = sorted({device for device, _ in lanes})
    per_device = -(-len(lanes) // len(devices))
    count = max(min(most_lanes // per_device, len(devices)), 1)
    chosen = {devices[i] for i in np.linspace(0, len(devices) - 1, count).round().astype(int)}
    return [lane for lane in lanes if lane[0] in chosen]


def bars_of(timeline: Timeline, view: View) -> Bars:
    """Return the tasks in a view, lane after lane."""
    pieces = dict(timeline.lane_slices())
    columns = []
    for place, lane in enumerate(view.lanes):
        start_s, end_s = timeline.start_s[:, pieces[lane]], timeline.end_s[:, pieces[lane]]
        at = step, task = np.nonzero(start_s < view.until_s)
        codes = timeline.schedule.lanes[lane].codes[task]
        columns.append((np.full(len(step), place, np.int32), start_s[at], end_s[at], step, codes))
    kinds = (np.int32, float, float, np.int32, np.int64)
    nothing = tuple(np.zeros(0, kind) for kind in kinds)
    return Bars(*(np.concatenate(column) for column in zip(nothing, *columns, strict=True)))


def links_of(timeline: Timeline, view: View) -> tuple[list[tuple[int, int]], Ints, MessageColumns]:
    """Return links between the view's devices, (from, to), and the place of each message in that list."""
    sent, devices = timeline.message_columns, view.devices
    between = np.isin(sent.source, devices) & np.isin(sent.target, devices)
    sent = sent.of(between & (sent.start_s < view.until_s))
    links, link = np.unique(np.stack([sent.source, sent.target], axis=1), axis=0, return_inverse=True)
    return [(int(a), int(b)) for a, b in links], link.ravel(), sent


def curve_points(curve: MemoryCurve, until_s: float, end_s: float) -> tuple[Floats, Floats]:
    """Return times and bytes of a memory curve, from 0 to the end; merged points keep the peak."""
    # Changes at one instant are one change: the last value counts.
    last = np.flatnonzero(np.diff(curve.time_s, append=np.inf))
    shown = last[curve.time_s[last] <= until_s]
    time_s, alive = curve.time_s[shown], curve.alive_bytes[shown]
    if len(time_s) > _CURVE_POINTS:
        keep = _extremes(alive, _CURVE_POINTS // 2)
        time_s, alive = time_s[keep], alive[keep]
    if not len(time_s):
        return np.array([0.0, end_s]), np.zeros(2)
    until = min(end_s, until_s)
    time_s, alive = np.append(time_s, until), np.append(alive, alive[-1])
    if time_s[0] > 0:
        time_s, alive = np.insert(time_s, 0, 0.0), np.insert(alive, 0, 0.0)
    return time_s, alive


def _extremes(values: Floats, buckets: int) -> Ints:
    """Return the places of the lowest and the highest value of each bucket, in order."""
    bounds = np.linspace(0, len(values), buckets + 1).astype(int)
    kept = set()
    for first, after in itertools.pairwise(bounds):
        part = values[first:after]
        kept |= {int(first + part.argmin()), int(first + part.argmax())}
    return np.array(sorted(kept))
