"""Writes a timeline as Chrome trace JSON: devices and links are processes, streams threads."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tf_ooo.planning.model.task import KINDS, Task
from tf_ooo.planning.pictures.style import (
    View,
    bars_of,
    curve_points,
    links_of,
    names_of_layers,
    stream_names,
    view_of,
)

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline

# Half a minute to write, 200 MB; viewers become slow above.
_MOST_TASKS, _MOST_LANES = 500_000, 4096
_MICROSECONDS = 1e6
_MEASURED = "measured: "
_UNKNOWN: Mapping[int, str] = MappingProxyType({})
_NO_TIMES = "not measured: every task is drawn 1 ms long; only the order means something"


def save_trace(
    timeline: Timeline,
    path: str | os.PathLike[str],
    measured: Timeline | None = None,
    order_only: bool = False,
    layers: Mapping[int, str] | None = None,
) -> None:
    """Write the file; above half a million tasks only the first seconds, with a warning in the log.

    Args:
        timeline: as planned.
        path: the file's path.
        measured: a timeline drawn in processes of its own, below the planned ones.
        order_only: whether planned times mean nothing, which the trace then says.
        layers: their names by number, as far as they are known.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    view = view_of(timeline, _MOST_TASKS, _MOST_LANES)
    names, first_name = layers or {}, "planned: " if measured is not None else ""
    if order_only:
        first_name = "planned order, times not measured: "
    events = trace_events(timeline, view, first_name, layers=names)
    summary = {"times": _NO_TIMES, **_whose(timeline)} if order_only else _summary(timeline, view)
    if measured is not None:
        view = view_of(measured, _MOST_TASKS, _MOST_LANES)
        first = timeline.schedule.devices + 1  # behind the links
        events = itertools.chain(events, trace_events(measured, view, _MEASURED, first, names))
        summary["measured"] = _summary(measured, view)
    with target.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms",\n')
        file.write(f'"otherData": {json.dumps(summary)},\n"traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


def trace_events(
    timeline: Timeline, view: View, name: str = "", first: int = 0, layers: Mapping[int, str] = _UNKNOWN
) -> Iterator[dict[str, Any]]:
    """Yield all events of the trace; times in microseconds.

    ``name`` is put before the names of processes, which are numbered from ``first`` on.  ``layers``: names by
    number.
    """
    events = itertools.chain(
        _names(timeline, view, name == _MEASURED),
        _tasks(timeline, view, layers),
        _messages(timeline, view),
        _memory(timeline, view),
    )
    for event in events:
        if event["name"] == "process_name":
            event["args"]["name"] = name + event["args"]["name"]
        if event["name"] == "process_sort_index":
            event["args"]["sort_index"] += first
        event["pid"] += first
        yield event


def _whose(timeline: Timeline) -> dict[str, Any]:
    return {"mode": timeline.schedule.mode, "policy": timeline.schedule.policy}


def _summary(timeline: Timeline, view: View) -> dict[str, Any]:
    facts = {name: getattr(timeline, name) for name in ("makespan_s", "bubble_fraction", "peak_bytes")}
    return {**_whose(timeline), **facts, "note": view.note}


def _process(pid: int, name: str) -> Iterator[dict[str, Any]]:
    place = {"pid": pid, "tid": 0}
    yield {"ph": "M", "name": "process_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": pid}}


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(
    name: str, kind: str, place: tuple[int, int], times_s: tuple[float, float], args: dict[str, Any]
) -> dict[str, Any]:
    """Return the event of a task that runs on a (process, thread) from start to end."""
    ts, dur = times_s[0] * _MICROSECONDS, (times_s[1] - times_s[0]) * _MICROSECONDS
    where = {"pid": place[0], "tid": place[1], "ts": ts, "dur": dur}
    return {"ph": "X", "name": name, "cat": kind, **where, "args": args}


def _names(timeline: Timeline, view: View, measured: bool) -> Iterator[dict[str, Any]]:
    for device in view.devices:
        yield from _process(device, f"device {device}")
    for (device, stream), name in stream_names(timeline.schedule, view.lanes, measured).items():
        yield _thread(device, stream, name)


def _tasks(timeline: Timeline, view: View, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    bars = bars_of(timeline, view)
    f = bars.fields
    columns = (bars.lane, bars.start_s, bars.end_s, bars.step, f.kind, f.stage, f.microbatch, f.part)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for lane, start_s, end_s, step, kind, stage, batch, part in rows:
        task, layers = Task(KINDS[kind], stage, batch, part), timeline.schedule.layers_of(stage)
        args = {"stage": stage, "layers": [layers[0], layers[-1]], "microbatch": batch, "step": step}
        if names:
            args["names"] = names_of_layers(layers, names)
        yield _span(str(task), task.kind, view.lanes[lane], (start_s, end_s), args)


def _messages(timeline: Timeline, view: View) -> Iterator[dict[str, Any]]:
    links, link_of, messages = links_of(timeline, view)
    names = [f"{source} to {target}" for source, target in links]
    pid = timeline.schedule.devices
    if names:
        yield from _process(pid, "links")
    for number, name in enumerate(names):
        yield _thread(pid, number, name)
    columns = (link_of, messages.start_s, messages.end_s, messages.size_bytes)
    for link, start_s, end_s, size in zip(*(column.tolist() for column in columns), strict=True):
        yield _span(names[link], "message", (pid, link), (start_s, end_s), {"bytes": size})


def _memory(timeline: Timeline, view: View) -> Iterator[dict[str, Any]]:
    for device in [device for device in view.devices if device < len(timeline.memory)]:
        time_s, alive = curve_points(timeline.memory[device], view.until_s, timeline.makespan_s)
        for at_s, count in zip(time_s.tolist(), alive.tolist(), strict=True):
            place = {"pid": device, "tid": 0, "ts": at_s * _MICROSECONDS}
            yield {"ph": "C", "name": "memory", **place, "args": {"bytes": count}}
