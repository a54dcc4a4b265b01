"""Defines what all pictures share: colours, names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tf_ooo.planning.model.schedule import Lane, Schedule
from tf_ooo.planning.model.task import KIND_NUMBER, Fields

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline

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
    """Return seconds of a repeated step; None where it would take a long simulation of several steps."""
    known = timeline.steps > 1 or timeline.schedule.asynchronous
    return timeline.steady_step_s if known or timeline.start_s.size <= _MOST_TO_REPEAT else None


def lane_label(schedule: Schedule, lane: Lane) -> str:
    """``device 3``, with the stream where the device has several."""
    device, stream = lane
    if sum(other == device for other, _ in schedule.lanes) == 1:
        return f"device {device}"
    tasks = schedule.lanes[lane]
    kinds = {task.kind for task in tasks[:1]} | {task.kind for task in tasks[-1:]}
    alone = kinds.pop() if len(kinds) == 1 else ""
    role = {"comm": "comm", "U": "update"}.get(alone) or _STREAMS.get(stream, f"stream {stream}")
    return f"device {device} {role}"


def stream_names(schedule: Schedule, lanes: Sequence[Lane], measured: bool = False) -> dict[Lane, str]:
    """Return a name for each stream of a device: what it is for; those for the same are numbered.

    Of ``measured`` lanes only communication and updates are streams: the others hold what ran side by side.
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
    """``dense``, or ``dense .. dense_3 (4 layers)``; the number of one that has no name."""
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
    """Return a task in as few letters as tell it apart: ``F3``, or ``2F3`` for stage 2."""
    if which == "stage":
        return f"{SHORT[kind]}{stage}"
    return f"{stage if which == 'both' else ''}{SHORT[kind]}{microbatch}"


def what_a_stage_is(schedule: Schedule) -> str:
    """Say what the number of a task counts: stages of several layers, or layers."""
    return "stage" if schedule.mode == "pipeline" or schedule.stages else "layer"


def numbers_text(schedule: Schedule) -> str:
    """Explain the letters and numbers of a box that is there."""
    stage_is, which = what_a_stage_is(schedule), numbering(schedule)
    kind, stage, batch = _example(schedule, which)
    counted = [f"{stage_is} {stage}"] if which != "microbatch" else []
    counted += [f"micro-batch {batch}"] if which != "stage" else []
    return f"{task_label(kind, stage, batch, which)}: {kind} of {', '.join(counted)}"


def _example(schedule: Schedule, which: str) -> tuple[str, int, int]:
    """Kind, stage and micro-batch of a task: a dO, if there is one; two numbers that differ, if they can."""
    fields = Fields.of(np.concatenate([np.zeros(0, np.int64), *(t.codes for t in schedule.lanes.values())]))
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
