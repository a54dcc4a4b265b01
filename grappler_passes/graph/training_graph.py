"""Defines the training graph as plain data: ops and their kinds, layers, tasks, variables, and memory peaks.

Nothing here imports TensorFlow.  A :class:`TrainingGraph` is made by
:func:`grappler_passes.analysis.classify.classify_graph_def` and read by every pass, scheduler and report.

The outputs of an op count as one tensor, which lives from the op's execution until the last op that reads it;
while an op runs, its inputs and its outputs are alive together.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from grappler_passes.errors import PlanError
from grappler_passes.graph.dependencies import SWITCHES, reached

# The output of these ops is a view of the first input: it needs no memory, but keeps that input alive.
_VIEWS = frozenset(
    {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Enter", "Exit",
     "NextIteration", *SWITCHES, "LoopCond"}
)  # fmt: skip
# The memory of these ops is there before the step starts and stays: resident_bytes counts it.
_RESIDENT = frozenset({"_Arg", "Const", "Placeholder", "VarHandleOp", "ReadVariableOp"})


class OpKind(str, enum.Enum):
    """Names the purpose of an op in the field's words (out-of-order backprop, EuroSys 2022)."""

    FORWARD = "F"
    OUTPUT_GRAD = "dO"
    WEIGHT_GRAD = "dW"
    UPDATE = "U"
    COMMUNICATION = "comm"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Op:
    """Describes one op of the graph.

    ``inputs`` are data inputs as ``(producer, output index)``; ``control_inputs`` are producers.
    ``layer`` is the index into :attr:`TrainingGraph.layers`: set on dW and U ops, and on the
    communication that belongs to one layer; None elsewhere.
    ``output_bytes`` is the size of all outputs together, None where a shape is unknown.
    """

    name: str
    type: str
    kind: OpKind
    reason: str = ""
    layer: int | None = None
    inputs: tuple[tuple[str, int], ...] = ()
    control_inputs: tuple[str, ...] = ()
    device: str = ""
    output_bytes: int | None = None

    @cached_property
    def producers(self) -> tuple[str, ...]:
        """Return the ops that produce its data inputs, in the order of the inputs."""
        return tuple(producer for producer, _ in self.inputs)


@dataclass(frozen=True)
class Variable:
    """Holds a trainable variable: the graph node that holds its handle, its name and shape."""

    name: str
    handle: str
    shape: tuple[int, ...] | None = None
    slots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """Holds variables whose gradients share one dO, with the ops that belong to them alone.

    Layer 0's weights are the first that the next step needs.  A part of a divided layer has no variables and
    a ``label`` instead; a layer whose variables' common name is ambiguous has a ``label`` too.
    """

    index: int
    variables: tuple[str, ...]
    weight_grad_ops: tuple[str, ...] = ()
    update_ops: tuple[str, ...] = ()
    communication_ops: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """Return the variables' common name, for reports: ``conv1/kernel, conv1/bias`` is ``conv1``."""
        if self.label:
            return self.label
        common = []
        for first, *others in zip(*(v.split("/") for v in self.variables), strict=False):
            if {*others} - {first}:
                break
            common.append(first)
        return "/".join(common) or ", ".join(self.variables)


@dataclass(frozen=True)
class TrainingGraph:
    """Holds a classified training step; ``ops`` are in a topological order of data edges (loops broken).

    ``unclassified`` maps a backward op that got no kind, or a trainable variable without a gradient, to the
    reason. ``mixed`` maps an op that computes both dO and dW to the reason.
    """

    ops: Mapping[str, Op]
    layers: tuple[Layer, ...]
    variables: tuple[Variable, ...]
    unclassified: Mapping[str, str] = field(default_factory=dict)
    mixed: Mapping[str, str] = field(default_factory=dict)

    def of_kind(self, kind: OpKind) -> list[str]:
        return [name for name, op in self.ops.items() if op.kind is kind]

    def counts(self) -> dict[str, int]:
        """Count the ops of each kind, keyed ``F``, ``dO``, ``dW``, ``U``, ``comm``, ``other``."""
        kinds = [op.kind for op in self.ops.values()]
        return {kind.value: kinds.count(kind) for kind in OpKind}

    def numbered_as(self, layers: Sequence[Collection[str]]) -> TrainingGraph | None:
        """Return the graph with its layers (given by their variables) in this order; None if they differ.

        Two graphs of one step may number the layers of parallel branches in either order.
        """
        own = {frozenset(layer.variables): layer for layer in self.layers}
        wanted = [frozenset(variables) for variables in layers]
        if own.keys() != set(wanted) or len(wanted) != len(self.layers):
            return None
        numbered = [replace(own[variables], index=number) for number, variables in enumerate(wanted)]
        return self.with_layers(numbered, [wanted.index(variables) for variables in own])

    def with_layers(self, layers: Iterable[Layer], numbers: Sequence[int]) -> TrainingGraph:
        """Return the same graph with other layers; ``numbers[old]`` is the new number of an old layer."""
        ops = {
            name: op if op.layer is None else replace(op, layer=numbers[op.layer])
            for name, op in self.ops.items()
        }
        return replace(self, ops=ops, layers=tuple(layers))


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

    A tensor that another device reads counts there too, for the same time: it is copied.
    """
    places = _devices_of(training_graph, order)
    alive: dict[str, int] = {}
    peak: dict[str, int] = {}
    for name, done in zip(order, freed_after(training_graph, order), strict=True):
        size = _own_bytes(training_graph.ops[name])
        for device in places[name]:
            alive[device] = now = alive.get(device, 0) + size
            peak[device] = max(peak.get(device, now), now)
        for gone in done:
            for device in places[gone]:
                alive[device] -= _own_bytes(training_graph.ops[gone])
    return peak


def _devices_of(training_graph: TrainingGraph, order: Sequence[str]) -> dict[str, set[str]]:
    """Return for each op the devices that hold its outputs: the op's own and its readers'."""
    owners: dict[str, str] = {}
    devices = {name: {training_graph.ops[name].device} for name in order}
    for name in order:
        op = training_graph.ops[name]
        owners[name] = _owner(op, owners)
        for producer in op.producers:
            devices.get(owners.get(producer, producer), set()).add(op.device)
    return devices


def unknown_sizes(training_graph: TrainingGraph) -> list[str]:
    """Return the ops whose outputs take an unknown amount of memory."""
    return [op.name for op in training_graph.ops.values() if op.output_bytes is None and owns_memory(op)]


def owns_memory(op: Op) -> bool:
    """Return whether an op's output takes memory of its own; views and resident tensors do not."""
    return op.type not in _VIEWS and op.type not in _RESIDENT


def _own_bytes(op: Op) -> int:
    return (op.output_bytes or 0) if owns_memory(op) else 0


def _owner(op: Op, owners: dict[str, str]) -> str:
    """Return the op in whose memory the output of ``op`` lies."""
    return owners.get(op.producers[0], op.name) if op.type in _VIEWS and op.inputs else op.name


# A task is the kind, such as ``"dO"``, and the layer.
LayerTask = tuple[str, int]
Tasks = Mapping[LayerTask, Sequence[str]]
_FORWARD = (OpKind.FORWARD, OpKind.OTHER)


@dataclass(frozen=True)
class BackwardTasks:
    """Holds the ops of each task in topological order, and the layers in the order of the backward pass."""

    ops: Mapping[LayerTask, tuple[str, ...]]
    layers: tuple[int, ...]


def backward_tasks(graph: TrainingGraph) -> BackwardTasks:
    """Cut the backward pass into tasks; constants can be made at any time and belong to none.

    A layer's dO are the dO ops that its dW ops read, and those upstream that no later layer has taken.
    """
    place = {name: i for i, name in enumerate(graph.ops)}
    claimed: set[str] = set()
    ops: dict[LayerTask, tuple[str, ...]] = {}

    def unclaimed(names: Iterable[str]) -> set[str]:
        return {n for n in place.keys() & names if graph.ops[n].kind is OpKind.OUTPUT_GRAD} - claimed

    def without_constants(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in place and graph.ops[name].type != "Const")

    reads: dict[int, set[str]] = {}
    for layer in graph.layers:
        weight_grads = ops["dW", layer.index] = without_constants(layer.weight_grad_ops)
        reads[layer.index] = unclaimed(p for name in weight_grads for p in graph.ops[name].producers)
    # If places are equal (two layers read one dO), the higher layer is nearer to the loss.
    layers = sorted(reads, key=lambda i: (max((place[name] for name in reads[i]), default=-1), -i))
    for index in layers:
        start = unclaimed(reads[index])
        own = reached(start, lambda name: unclaimed(producers_of(graph.ops[name])))
        claimed |= own
        ops["dO", index] = without_constants(sorted(own, key=place.__getitem__))
    return BackwardTasks({task: names for task, names in ops.items() if names}, tuple(layers))


def producers_of(op: Op) -> list[str]:
    """Return the ops that this op waits for, by data and by control edges."""
    return [*op.producers, *op.control_inputs]


def forward_layers(
    graph: TrainingGraph,
    together: Sequence[Collection[str]] = (),
    joins: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the layer of each forward op: the highest whose weights its result depends on.

    An op that depends on no weights (a dropout mask) counts for the lowest layer that reads it; if no layer
    reads it (a metric of the labels), it counts for the last.  ``together``: groups of ops that stay in one
    layer (loops), with edges that lead back.  ``joins``: ops that begin a layer without weights.
    """
    known = layers_of_weights_and_readers(graph, together, joins)
    last = len(graph.layers) - 1
    return {name: known.get(name, last) for name in graph.of_kind(OpKind.FORWARD)}


def layers_of_weights_and_readers(
    graph: TrainingGraph,
    together: Sequence[Collection[str]] = (),
    joins: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Return :func:`forward_layers` without ops that depend on no weights and that no layer reads."""
    at_least = {
        v.handle: layer.index for layer in graph.layers for v in graph.variables if v.name in layer.variables
    } | dict(joins)
    latest = _latest_weights(graph, at_least)
    while raised := _raised(graph, latest, together):
        at_least |= raised
        latest = _latest_weights(graph, at_least)
    return _earliest_reader(graph, latest) | latest


def _latest_weights(graph: TrainingGraph, at_least: Mapping[str, int]) -> dict[str, int]:
    """Return the highest layer that each forward op depends on, ``at_least`` what is already known."""
    latest: dict[str, int] = {}
    for name, op in graph.ops.items():
        if op.kind in _FORWARD or name in at_least:
            known = [latest[producer] for producer, _ in op.inputs if producer in latest]
            known += [at_least[name]] if name in at_least else []
            if known:
                latest[name] = max(known)
    return latest


def _raised(
    graph: TrainingGraph, latest: Mapping[str, int], together: Sequence[Collection[str]]
) -> dict[str, int]:
    """Return the new layers of groups whose ops differ in layer: the highest; empty if none differ."""
    raised: dict[str, int] = {}
    for names in together:
        forward = [name for name in names if graph.ops[name].kind in _FORWARD]
        highest = max((latest[name] for name in forward if name in latest), default=None)
        if highest is not None and any(latest.get(name) != highest for name in forward):
            raised |= dict.fromkeys(forward, highest)
    return raised


def _earliest_reader(graph: TrainingGraph, latest: Mapping[str, int]) -> dict[str, int]:
    """Return, for ops that depend on no weights, the lowest layer among the forward ops that read them."""
    earliest: dict[str, int] = {}
    for name, op in reversed(list(graph.ops.items())):
        reader = latest.get(name, earliest.get(name)) if op.kind is OpKind.FORWARD else None
        if reader is not None:
            for producer, _ in op.inputs:
                if producer not in latest:
                    earliest[producer] = min(earliest.get(producer, reader), reader)
    return earliest


def ops_by_task(
    graph: TrainingGraph, tasks: Tasks | None = None, forward: Mapping[str, int] | None = None
) -> dict[LayerTask, list[str]]:
    """Return the ops of each (kind, layer); a kernel that computes both (``FusedBatchNormGradV3``) is dO."""
    tasks = backward_tasks(graph).ops if tasks is None else tasks
    forward = forward_layers(graph) if forward is None else forward
    output_grads = {name for (kind, _), names in tasks.items() if kind == "dO" for name in names}
    by_task: dict[LayerTask, list[str]] = {
        (kind, index): [name for name in names if kind == "dO" or name not in output_grads]
        for (kind, index), names in tasks.items()
    }
    for layer in graph.layers:
        by_task["U", layer.index] = list(layer.update_ops)
    for name, index in forward.items():
        by_task.setdefault(("F", index), []).append(name)
    return by_task
