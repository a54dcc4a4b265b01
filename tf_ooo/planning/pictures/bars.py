"""The tasks of a timeline as columns to draw, cut to what a picture can show."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints
from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.schedule import Lane
from tf_ooo.planning.model.task import Fields

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline

LOG = logging.getLogger("tf_ooo.pictures")
_CURVE_POINTS = 4000


@dataclass(frozen=True)
class View:
    """Says what of a timeline is drawn: lanes, what starts before ``until_s``; ``note``: what is left out."""

    lanes: Sequence[Lane]
    until_s: float
    note: str = ""

    @property
    def devices(self) -> list[int]:
        return sorted({device for device, _ in self.lanes})


@dataclass(frozen=True)
class Bars:
    """Columns, one row for each task and step; ``lane`` are indices into the view's lanes."""

    lane: Ints
    start_s: Floats
    end_s: Floats
    step: Ints
    fields: Fields

    def __len__(self) -> int:
        return len(self.start_s)

    def of_kind(self, number: int) -> Bars:
        """Return the tasks of one kind, by its place in KINDS."""
        f, rows = self.fields, self.fields.kind == number
        fields = Fields(f.kind[rows], f.stage[rows], f.microbatch[rows], f.part[rows])
        return Bars(self.lane[rows], self.start_s[rows], self.end_s[rows], self.step[rows], fields)


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
    note = ""
    if notes:
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
    where, start_s, end_s, step, codes = (
        np.concatenate([np.zeros(0, kind), *(column[i] for column in columns)])
        for i, kind in enumerate((np.int32, float, float, np.int32, np.int64))
    )
    return Bars(where, start_s, end_s, step, Fields.of(codes))


@dataclass(frozen=True)
class LinkBars:
    """Messages of a view; ``link`` are indices into ``links``, pairs (from, to) of devices."""

    links: Sequence[tuple[int, int]]
    link: Ints
    start_s: Floats
    end_s: Floats
    size_bytes: Floats


def links_of(timeline: Timeline, view: View) -> LinkBars:
    """Return the messages between the devices of a view."""
    sent, devices = timeline.message_columns, view.devices
    shown = np.isin(sent.source, devices) & np.isin(sent.target, devices) & (sent.start_s < view.until_s)
    pairs = np.stack([sent.source[shown], sent.target[shown]], axis=1)
    links, link = np.unique(pairs, axis=0, return_inverse=True)
    start_s, end_s, size_bytes = (column[shown] for column in (sent.start_s, sent.end_s, sent.size_bytes))
    return LinkBars([(int(a), int(b)) for a, b in links], link.ravel(), start_s, end_s, size_bytes)


def curve_points(curve: MemoryCurve, until_s: float, end_s: float) -> tuple[Floats, Floats]:
    """Times and bytes of a memory curve, from 0 to the end; the peak survives where points are merged."""
    time_s, alive = np.asarray(curve.time_s), np.asarray(curve.alive_bytes)
    # Changes at one instant are one change: the last value counts.
    last = np.append(time_s[1:] != time_s[:-1], True) if len(time_s) else np.zeros(0, bool)
    time_s, alive = time_s[last], alive[last]
    shown = time_s <= until_s
    time_s, alive = time_s[shown], alive[shown]
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
    """Places of the lowest and the highest value of each bucket, in order."""
    bounds = np.linspace(0, len(values), buckets + 1).astype(int)
    kept = set()
    for first, after in zip(bounds[:-1], bounds[1:], strict=True):
        part = values[first:after]
        kept |= {int(first + part.argmin()), int(first + part.argmax())}
    return np.array(sorted(kept))
