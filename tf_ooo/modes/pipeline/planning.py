"""Which schedule, on which cuts: every candidate is simulated with the measured costs.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OOOError, OptionsError
from tf_ooo.modes.pipeline.partition import Bounds, Cutter, merged
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.rewriting.plan import plan

# Stages on each device.
_TWO = ("zb_v", "v_half", "v_min", "dualpipe_v")
_MANY = {"interleaved_1f1b": (2, 3, 4), "modulo": (1, 2, 3, 4, 6, 8, 12)}
# Measured peaks were up to 1.103 of the predicted ones: plans stay as much below a limit.
PEAK_MARGIN = (9, 8)
SCHEDULES = tuple(policy.name for policy in POLICIES.values() if "pipeline" in policy.modes)


@dataclass(frozen=True)
class Planned:
    """A schedule and the cuts that it was made for.

    Attributes:
        schedule: its stages are groups of layers.
        bounds: (first, last) layer of each stage.
        stages: their costs.
        timeline: of one step.
        candidates: what was looked at, for the report.
    """

    schedule: Schedule
    bounds: Bounds
    stages: tuple[LayerCosts, ...]
    timeline: Timeline
    candidates: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def makespan_s(self) -> float:
        """Predicted seconds of one step."""
        return float(self.timeline.makespan_s)

    @property
    def stage_of_layer(self) -> list[int]:
        """The stage of each layer."""
        return [stage for stage, (first, last) in enumerate(self.bounds) for _ in range(first, last + 1)]

    @property
    def device_of_stage(self) -> list[int]:
        """The number of each stage's device."""
        found = {task.stage: device for (device, _), tasks in self.schedule.lanes.items() for task in tasks}
        return [found[stage] for stage in range(len(self.bounds))]


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Attributes:
        schedule: a policy's name or auto.
        devices, microbatches: numbers.
        link: between devices.
        memory_limit_bytes: of each device; predicted peaks stay below it by :data:`PEAK_MARGIN`.
        chunks, group: options of interleaved_1f1b and modulo; None: tried.
    """

    schedule: str
    devices: int
    microbatches: int
    link: Link = Link()
    memory_limit_bytes: int | None = None
    chunks: int | None = None
    group: int | None = None

    @property
    def planned_limit_bytes(self) -> int | None:
        """What predicted peaks have to stay within."""
        measured, predicted = PEAK_MARGIN
        limit = self.memory_limit_bytes
        return None if limit is None else max(1, limit * predicted // measured)


def make_plan(layers: Sequence[LayerCosts], units: Bounds, wanted: Wanted) -> Planned:
    """The schedule asked for with the best cuts, or for auto the one with the shortest step.

    Raises:
        OptionsError: more stages than layers.
        MemoryLimitError: none stays within the limit; says the lowest that one can keep.
    """
    cutter = Cutter(tuple(layers), units, wanted.link, wanted.microbatches)
    names = SCHEDULES if wanted.schedule == "auto" else (wanted.schedule,)
    found: list[Planned] = []
    rows: list[dict[str, Any]] = []
    errors: list[OOOError] = []
    for name in names:
        for bounds, options in _cuts(name, cutter, wanted, errors):
            row: dict[str, Any] = {"schedule": name, "stages": len(bounds)}
            rows.append(row)
            try:
                one = _planned(name, tuple(layers), bounds, options, wanted)
            except OOOError as error:
                errors.append(error)
                row["reason"] = str(error)
                continue
            row |= {"predicted_step_s": one.makespan_s, "peak_bytes": max(one.timeline.peak_bytes, default=0)}
            found.append(one)
    if not found:
        raise _none_left(errors, wanted)
    best = min(found, key=_rank)
    return dataclasses.replace(best, candidates=tuple(rows))


def _rank(one: Planned) -> tuple[float, int, int]:
    # The rounding of sums must not decide; fewer stages send less.
    return float(f"{one.makespan_s:.6g}"), len(one.bounds), max(one.timeline.peak_bytes, default=0)


def _cuts(
    name: str, cutter: Cutter, wanted: Wanted, errors: list[OOOError]
) -> Iterator[tuple[Bounds, dict[str, Any]]]:
    """Cuts to try for a policy, with the options that make it take one stage for each."""
    if name == "modulo" and wanted.group is not None:
        groups = _groups(cutter.units, wanted.group)
        if len(groups) < wanted.devices:
            raise OptionsError(
                f"group={wanted.group}: {len(cutter.units)} layers make {len(groups)} groups, fewer than the "
                f"{wanted.devices} devices; use a smaller one"
            )
        yield groups, {"group": 1}
        return
    counts: tuple[int, ...] = (2,) if name in _TWO else _MANY.get(name, (1,))
    if name == "interleaved_1f1b" and wanted.chunks is not None:
        counts = (wanted.chunks,)
    for count in counts:
        options = {"interleaved_1f1b": {"chunks": count}, "modulo": {"group": 1}}.get(name, {})
        try:
            yield cutter.cut(count * wanted.devices), options
            if wanted.memory_limit_bytes is not None:
                yield from ((bounds, options) for bounds in cutter.cut_by_bytes(count * wanted.devices))
        except OOOError as error:
            errors.append(error)
            return


def _groups(units: Bounds, size: int) -> Bounds:
    """As many units in each stage, the last may have fewer."""
    starts = range(0, len(units), size)
    return tuple((units[i][0], units[min(i + size, len(units)) - 1][1]) for i in starts)


def _planned(
    name: str, layers: tuple[LayerCosts, ...], bounds: Bounds, options: dict[str, Any], wanted: Wanted
) -> Planned:
    stages = merged(layers, bounds, wanted.microbatches)
    schedule = plan(
        layers=list(stages),
        schedule=name,
        mode="pipeline",
        devices=wanted.devices,
        microbatches=wanted.microbatches,
        link=wanted.link,
        memory_limit_bytes=wanted.planned_limit_bytes,
        **options,
    )
    timeline = simulate(schedule, list(stages), wanted.link)
    schedule = dataclasses.replace(
        schedule,
        predicted_step_s=float(timeline.makespan_s),
        predicted_peak_bytes=max(timeline.peak_bytes, default=0),
    )
    return Planned(schedule, bounds, stages, timeline)


def _none_left(errors: Sequence[OOOError], wanted: Wanted) -> OOOError:
    limits = [e.smallest_bytes for e in errors if isinstance(e, MemoryLimitError) and e.smallest_bytes]
    if limits and wanted.memory_limit_bytes is not None:
        measured, predicted = PEAK_MARGIN
        smallest = -(-math.ceil(min(limits)) * measured // predicted)
        return MemoryLimitError(wanted.memory_limit_bytes, smallest)
    return errors[0] if errors else OptionsError(f"schedule={wanted.schedule!r}: no cut is possible")
