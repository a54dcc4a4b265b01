"""Is a schedule complete, and can it run at all?  Errors name the task and what it violates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts, check_layers
from tf_ooo.errors import CostError, ScheduleError
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.engine import LaneKind, Work, run

_SHOWN = 12
_SECONDS = {"F": "forward_s", "dO": "output_grad_s", "dW": "weight_grad_s", "U": "update_s"}


def validate(schedule: Schedule, layers: Sequence[LayerCosts] | None = None) -> None:
    """Checks a schedule against the dependency relation.

    Args:
        schedule: what to check.
        layers: the layers' costs; None: a chain of layers in which every task is needed that any
            stage has.

    Raises:
        ScheduleError: a task is missing or unknown, or tasks wait for each other in a circle; names
            the tasks, the lanes and the dependency that is violated.
    """
    checked = None if layers is None else check_layers(layers)
    relation = Relation(schedule, checked)
    check_complete(relation, checked)
    if np.isnan(run(_untimed(relation))[0]).any():
        raise deadlock(relation)
    if schedule.steps_ahead:
        from tf_ooo.planning.simulation.simulator import simulate  # noqa: PLC0415 - the simulator needs this module

        ends = [relation.stages, *(last + 1 for _, last in schedule.stages)]
        simulate(schedule, checked or [LayerCosts(0, 0, 0)] * max(ends), steps=schedule.steps_ahead + 2)


def check_complete(relation: Relation, layers: Sequence[LayerCosts] | None) -> None:
    """ScheduleError or CostError unless every task that costs something is there, for all layers."""
    schedule = relation.schedule
    if layers is not None:
        _check_layer_count(relation, len(layers))
    for kind in ("F", "dO", "dW", "U"):
        there = [relation.has(kind, stage) for stage in range(relation.stages)]
        if kind in ("F", "U") and not any(there):
            continue  # the plan for a graph orders the backward pass alone
        for stage in range(relation.stages):
            if there[stage]:
                _check_all_there(relation, kind, stage)
            elif layers is not None and _costs(schedule, layers, kind, stage):
                raise ScheduleError(f"missing: {kind}:{stage} has costs and is not in the schedule")


def _check_layer_count(relation: Relation, layers: int) -> None:
    schedule = relation.schedule
    needed = schedule.stages[-1][1] + 1 if schedule.stages else relation.stages
    if needed > layers:
        raise CostError(f"costs are missing for layer {layers}: the schedule has {needed} layers")
    if needed < layers:
        raise ScheduleError(f"missing: layer {needed} has costs and is in no stage of the schedule")


def _costs(schedule: Schedule, layers: Sequence[LayerCosts], kind: str, stage: int) -> bool:
    return any(getattr(layers[i], _SECONDS[kind]) for i in schedule.layers_of(stage))


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
        if kind == "U" and relation.schedule.update_every > 1:
            absent = np.array([m for m in absent if relation.schedule.updates_after(int(m))], int)
        if once and len(absent) == nodes.shape[1] - 1 and nodes[part, 0] >= 0:
            continue
        if len(absent):
            raise ScheduleError(f"missing: {kind}:{stage}{slot}@{absent[0]} is not in the schedule")


def _untimed(relation: Relation) -> Work:
    """All tasks with no duration: whatever never starts waits for itself."""
    edges = [e for e in relation.edges if not e.steps]
    sources = np.concatenate([np.zeros(0, np.int64), *(e.source for e in edges)])
    targets = np.concatenate([np.zeros(0, np.int64), *(e.target for e in edges)])
    by_priority = [lane in relation.schedule.priority_lanes for lane in relation.lanes]
    kinds = np.where(by_priority, LaneKind.PRIORITY, LaneKind.ORDERED).astype(np.int8)
    return Work(np.zeros(len(relation)), relation.bases, kinds, sources, targets, np.zeros(len(sources)))


def deadlock(relation: Relation) -> ScheduleError:
    """The error that shows one circle of tasks that wait for each other."""
    start, _ = run(_untimed(relation))
    stuck = np.isnan(start)
    waits = _waits(relation, stuck)
    if not waits:  # within one step all is well
        tasks = "; ".join(f"{a} waits for {b} of {n} steps later" for a, b, n in relation.schedule.after if n)
        return ScheduleError(f"cycle: over several steps: {tasks}")
    seen: dict[int, int] = {}
    node = next(iter(waits))
    path: list[tuple[int, str]] = []
    while node not in seen:
        seen[node] = len(path)
        before, why = waits[node]
        path.append((node, why))
        node = before
    circle = path[seen[node] :]
    shown = [f"{_named(relation, node)} waits for {why}" for node, why in circle[:_SHOWN]]
    more = f"; and {len(circle) - _SHOWN} more" if len(circle) > _SHOWN else ""
    return ScheduleError(f"cycle: {'; '.join(shown)}{more}")


def _waits(relation: Relation, stuck: np.ndarray) -> dict[int, tuple[int, str]]:
    """For each node that never starts, one that it waits for and why: data before the lane's order."""
    found: dict[int, tuple[int, str]] = {}
    for node in np.flatnonzero(stuck).tolist():
        lane = int(relation.lane[node])
        ordered = relation.lanes[lane] not in relation.schedule.priority_lanes
        if ordered and node > relation.bases[lane] and stuck[node - 1]:
            found[node] = node - 1, f"{relation.task(node - 1)}, which stands before it"
    for edges in relation.edges:
        if edges.steps:
            continue
        both = stuck[edges.source] & stuck[edges.target]
        for source, target in zip(edges.source[both].tolist(), edges.target[both].tolist(), strict=True):
            found[target] = source, f"{_named(relation, source)} ({edges.why})"
    return found


def _named(relation: Relation, node: int) -> str:
    device, stream = relation.lanes[int(relation.lane[node])]
    return f"{relation.task(node)} on lane {device} {stream}"
