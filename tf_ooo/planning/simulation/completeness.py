"""Is every task there, and can each of them start?  Errors name the task and what it violates."""

from __future__ import annotations

import itertools

import numpy as np

from tf_ooo.costs.layer_costs import SECONDS, Link
from tf_ooo.errors import CostError, ScheduleError
from tf_ooo.planning.model.relation import Layers, Relation, stage_sums
from tf_ooo.planning.model.task import Bools, Ints
from tf_ooo.planning.simulation.clock import LaneKind, LaneWork

_SHOWN = 12


def check_complete(relation: Relation, layers: Layers | None) -> None:
    """ScheduleError or CostError unless every task that costs something is there, for all layers."""
    schedule = relation.schedule
    needed = schedule.stages[-1][1] + 1 if schedule.stages else relation.stages
    if layers is not None and needed > len(layers):
        raise CostError(f"costs are missing for layer {len(layers)}: the schedule has {needed} layers")
    if layers is not None and needed < len(layers):
        raise ScheduleError(f"missing: layer {needed} has costs and is in no stage of the schedule")
    for kind, stage in schedule.parts:
        if stage >= relation.stages:
            raise ScheduleError(f"parts {kind}:{stage}: the schedule has {relation.stages} stages")
    for kind in ("F", "dO", "dW", "U"):
        there = [relation.has(kind, stage) for stage in range(relation.stages)]
        if kind in ("F", "U") and not any(there):
            continue  # the plan for a graph orders the backward pass alone
        takes_s = None if layers is None else stage_sums(schedule, layers, SECONDS[kind], relation.stages)
        for stage in range(relation.stages):
            if there[stage]:
                _check_all_there(relation, kind, stage)
            elif takes_s is not None and takes_s[stage]:
                raise ScheduleError(f"missing: {kind}:{stage} has costs and is not in the schedule")


def _check_all_there(relation: Relation, kind: str, stage: int) -> None:
    once = kind == "U" and not relation.schedule.asynchronous
    parts = len(relation.schedule.parts.get((kind, stage), (1.0,)))
    nodes = relation.nodes(kind, stage)
    beyond = np.flatnonzero((nodes[parts:] >= 0).any(axis=1))
    if len(beyond):
        slot = f"{kind}:{stage}.{parts + beyond[0]}"
        given = f"there are {parts} parts" if parts > 1 else f"there is no line 'parts {kind}:{stage}: ...'"
        raise ScheduleError(f"unknown op {slot}: {given}")
    for part in range(parts):
        slot = f".{part}" if part else ""
        absent = np.flatnonzero(nodes[part] < 0) if part < len(nodes) else np.zeros(1, int)
        if once and len(absent) == nodes.shape[1] - 1 and nodes[part, 0] >= 0:
            continue
        if len(absent):
            raise ScheduleError(f"missing: {kind}:{stage}{slot}@{absent[0]} is not in the schedule")


def never_start(relation: Relation) -> Bools:
    """Return which tasks wait for themselves: they never start even if no task takes any time."""
    source, target, no_lag = relation.within_step(Link())
    no_time = np.zeros(len(relation))
    start, _ = LaneWork(no_time, relation.bases, lane_kinds(relation), source, target, no_lag).times()
    return np.isnan(start)


def lane_kinds(relation: Relation) -> Ints:
    """Return for each lane of the schedule whether its order is fixed or its tasks run by priority."""
    return np.where(relation.by_priority, LaneKind.PRIORITY, LaneKind.ORDERED).astype(np.int8)


def deadlock(relation: Relation) -> ScheduleError:
    """Return the error that shows one circle of tasks that wait for each other."""
    waits = _waits(relation, never_start(relation))
    if not waits:  # within one step all is well
        tasks = "; ".join(f"{a} waits for {b} of {n} steps later" for a, b, n in relation.schedule.after if n)
        return ScheduleError(f"cycle: over several steps: {tasks}")
    node, path = next(iter(waits)), dict[int, str]()
    while node not in path:
        before, path[node] = waits[node]
        node = before
    circle = list(itertools.dropwhile(lambda step: step[0] != node, path.items()))
    shown = [f"{_named(relation, node)} waits for {why}" for node, why in circle[:_SHOWN]]
    more = f"; and {len(circle) - _SHOWN} more" if len(circle) > _SHOWN else ""
    return ScheduleError(f"cycle: {'; '.join(shown)}{more}")


def _waits(relation: Relation, stuck: Bools) -> dict[int, tuple[int, str]]:
    """Return, for each node that never starts, one that it waits for and why: data before lanes' order."""
    waits: dict[int, tuple[int, str]] = {}
    for node in np.flatnonzero(stuck).tolist():
        lane = relation.lane[node]
        if not relation.by_priority[lane] and node > relation.bases[lane] and stuck[node - 1]:
            waits[node] = node - 1, f"{relation.task(node - 1)}, which stands before it"
    for edges in (edges for edges in relation.edges if not edges.steps):
        both = stuck[edges.source] & stuck[edges.target]
        for source, target in zip(edges.source[both].tolist(), edges.target[both].tolist(), strict=True):
            waits[target] = source, f"{_named(relation, source)} ({edges.why})"
    return waits


def _named(relation: Relation, node: int) -> str:
    device, stream = relation.lanes[int(relation.lane[node])]
    return f"{relation.task(node)} on lane {device} {stream}"
