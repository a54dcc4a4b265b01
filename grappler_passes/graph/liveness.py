"""Peak memory of an execution order, from the lifetimes of tensors.

An op's outputs, which count as one tensor, live from its execution until that of the last op that reads them;
while an op runs, its inputs and its outputs are alive together.
"""

from __future__ import annotations

from collections.abc import Sequence

from grappler_passes.errors import PlanError
from grappler_passes.graph.dependencies import SWITCHES
from grappler_passes.graph.training_graph import Op, TrainingGraph

# Outputs that are a view of the first input: no memory of their own, but they keep that input alive.
_VIEWS = frozenset(
    {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Enter", "Exit",
     "NextIteration", *SWITCHES, "LoopCond"}
)  # fmt: skip
# Memory that is there before the step starts and stays: counted in resident_bytes.
_RESIDENT = frozenset({"_Arg", "Const", "Placeholder", "VarHandleOp", "ReadVariableOp"})


def last_uses(training_graph: TrainingGraph, order: Sequence[str]) -> dict[str, int]:
    """Return for each op of ``order`` the position after which its outputs can be freed.

    Reads through views count; what an op outside ``order`` reads lives to the end, ``len(order)``.  Raises
    PlanError on unknown and repeated ops.
    """
    place: dict[str, int] = {}
    for position, name in enumerate(order):
        if name not in training_graph.ops:
            raise PlanError(f"the order names an op that is not in the graph: {name!r}")
        if name in place:
            raise PlanError(f"the order names an op twice: {name!r}")
        place[name] = position
    last = dict(place)
    owners: dict[str, str] = {}
    for name in order:
        op = training_graph.ops[name]
        owners[name] = _owner(op, owners)
        for producer in op.producers:
            if producer in place:
                owner = owners.get(producer, producer)
                last[owner] = max(last[owner], place[name])
    for name, op in training_graph.ops.items():
        if name not in place:
            for producer in place.keys() & op.producers:
                last[owners[producer]] = len(order)
    return last


def freed_after(training_graph: TrainingGraph, order: Sequence[str]) -> list[list[str]]:
    """Return for each position of ``order`` the ops whose outputs are freed once the op there has run."""
    freed: list[list[str]] = [[] for _ in order]
    for name, position in last_uses(training_graph, order).items():
        if position < len(order) and owns_memory(training_graph.ops[name]):
            freed[position].append(name)
    return freed


def peak_bytes_by_device(training_graph: TrainingGraph, order: Sequence[str]) -> dict[str, int]:
    """Return the most bytes alive at once on each device when ops run one at a time in ``order``.

    A tensor that another device reads counts there too, for as long: it is copied.
    """
    places = _devices_of(training_graph, order)
    alive: dict[str, int] = {}
    peak: dict[str, int] = {}
    for name, done in zip(order, freed_after(training_graph, order), strict=True):
        size = _own_bytes(training_graph.ops[name])
        for device in places[name]:
            alive[device] = alive.get(device, 0) + size
            peak[device] = max(peak.get(device, 0), alive[device])
        for gone in done:
            for device in places[gone]:
                alive[device] -= _own_bytes(training_graph.ops[gone])
    return peak


def _devices_of(training_graph: TrainingGraph, order: Sequence[str]) -> dict[str, set[str]]:
    """Return for each op the devices that its outputs are on: its own and those of its readers."""
    owners: dict[str, str] = {}
    devices = {name: {training_graph.ops[name].device} for name in order}
    for name in order:
        op = training_graph.ops[name]
        owners[name] = _owner(op, owners)
        for producer in op.producers:
            devices.get(owners.get(producer, producer), set()).add(op.device)
    return devices


def unknown_sizes(training_graph: TrainingGraph) -> list[str]:
    """Return ops whose outputs take memory, nobody knows how much."""
    return [op.name for op in training_graph.ops.values() if op.output_bytes is None and owns_memory(op)]


def owns_memory(op: Op) -> bool:
    """Return False for views and for what is resident anyway."""
    return op.type not in _VIEWS and op.type not in _RESIDENT


def _own_bytes(op: Op) -> int:
    return (op.output_bytes or 0) if owns_memory(op) else 0


def _owner(op: Op, owners: dict[str, str]) -> str:
    """Return the op whose memory ``op``'s output lies in."""
    return owners.get(op.producers[0], op.name) if op.type in _VIEWS and op.inputs else op.name
