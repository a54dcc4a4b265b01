"""What all pictures share: colours, names, units."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tf_ooo.planning.model.schedule import Lane, Schedule
from tf_ooo.planning.model.task import Fields

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


@dataclass(frozen=True)
class Unit:
    """A unit that numbers are shown in: ``value / size`` and its name."""

    name: str
    size: float


_TIMES = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6))
# Decimal, as links and data sheets count.
_SIZES = (Unit("TB", 1e12), Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3), Unit("bytes", 1.0))


def time_unit(seconds: float) -> Unit:
    """The unit in which a time is easy to read."""
    return next((unit for unit in _TIMES if seconds >= unit.size), _TIMES[-1])


def bytes_unit(count: float) -> Unit:
    """The unit in which a number of bytes is easy to read."""
    return next((unit for unit in _SIZES if count >= unit.size), _SIZES[-1])


def time_text(seconds: float | None) -> str:
    """``12.3 ms``; a dash for None."""
    if seconds is None:
        return "-"
    unit = time_unit(seconds)
    return f"{seconds / unit.size:.4g} {unit.name}"


def bytes_text(count: float | None) -> str:
    """``1.23 GB``; a dash for None."""
    if count is None:
        return "-"
    unit = bytes_unit(count)
    return f"{count / unit.size:.4g} {unit.name}" if unit.size > 1 else f"{count:.0f} bytes"


def with_units(text: str) -> str:
    """Numbers of bytes in a sentence as :func:`bytes_text` writes them."""
    return re.sub(r"\b(\d{4,}) bytes( \([\d.]+ [MG]B\))?", lambda match: bytes_text(int(match[1])), text)


def steady_step_s(timeline: Timeline) -> float | None:
    """Seconds of a repeated step; None where it would take a long simulation of several steps."""
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


def numbering(schedule: Schedule) -> str:
    """Which numbers tell the tasks of one lane apart: ``stage``, ``microbatch`` or ``both``."""
    if schedule.microbatches == 1:
        return "stage"
    stages = (Fields.of(tasks.codes).stage for tasks in schedule.lanes.values())
    one_each = all(not len(stage) or stage.min() == stage.max() for stage in stages)
    return "microbatch" if one_each else "both"


def task_label(kind: str, stage: int, microbatch: int, which: str) -> str:
    """A task in as few letters as tell it apart: ``F3``, or ``2F3`` for stage 2."""
    if which == "stage":
        return f"{SHORT[kind]}{stage}"
    return f"{stage if which == 'both' else ''}{SHORT[kind]}{microbatch}"


def what_a_stage_is(schedule: Schedule) -> str:
    """What the number of a task counts: stages of several layers, or layers."""
    return "stage" if schedule.mode == "pipeline" or schedule.stages else "layer"


def numbers_text(schedule: Schedule) -> str:
    """What the letters and numbers in the boxes say."""
    stage = what_a_stage_is(schedule)
    which = numbering(schedule)
    if which == "both":
        return f"2o3: dO of {stage} 2, micro-batch 3"
    return f"o3: dO of {stage if which == 'stage' else 'micro-batch'} 3"
