"""The training graph as plain data: ops with their kind, layers, variables; and its orders' peak memory.

Nothing here imports TensorFlow.  A :class:`TrainingGraph` is made by
:func:`grappler_passes.analysis.classify.classify_graph_def` and read by every pass, scheduler and report.

An op's outputs, which count as one tensor, live from its execution until that of the last op that reads them;
while an op runs, its inputs and its outputs are alive together.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from grappler_passes.errors import PlanError
from grappler_passes.graph.dependencies import SWITCHES

# Outputs that are a view of the first input: no memory of their own, but they keep that input alive.
_VIEWS = frozenset(
    {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Enter", "Exit",
     "NextIteration", *SWITCHES, "LoopCond"}
)  # fmt: skip
# Memory that is there before the step starts and stays: counted in resident_bytes.
_RESIDENT = frozenset({"_Arg", "Const", "Placeholder", "VarHandleOp", "ReadVariableOp"})


class OpKind(str, enum.Enum):
    """Names the purpose of an op in the field's own words (out-of-order backprop, EuroSys 2022)."""

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
    """One node of the graph.

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
        """Return the ops behind its data inputs, in their order."""
        return tuple(producer for producer, _ in self.inputs)


@dataclass(frozen=True)
class Variable:
    """A trainable variable: the graph node that holds its handle, its name and shape."""

    name: str
    handle: str
    shape: tuple[int, ...] | None = None
    slots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """Variables whose gradients share one dO, with the ops that belong to them alone.

    Layer 0's weights are the ones that the next step needs first.  A part of a layer that was divided has no
    variables and a ``label`` instead; so has a layer whose variables' common name does not tell it apart.
    """

    index: int
    variables: tuple[str, ...]
    weight_grad_ops: tuple[str, ...] = ()
    update_ops: tuple[str, ...] = ()
    communication_ops: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """The variables' common name, for reports: ``conv1/kernel, conv1/bias`` is ``conv1``."""
        if self.label:
            return self.label
        if len(self.variables) == 1:
            return self.variables[0]
        parts = [v.split("/") for v in self.variables]
        common = []
        for pieces in zip(*parts, strict=False):
            if len(set(pieces)) != 1:
                break
            common.append(pieces[0])
        return "/".join(common) or ", ".join(self.variables)


@dataclass(frozen=True)
class TrainingGraph:
    """A classified training step; ``ops`` are in a topological order of data edges (loops broken).

    ``unclassified`` maps an op of the backward pass that got no kind, and a trainable variable without a
    gradient, to the reason; ``mixed`` an op that computes dO and dW together.
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
        out = {kind.value: 0 for kind in OpKind}
        for op in self.ops.values():
            out[op.kind.value] += 1
        return out

    def numbered_as(self, layers: Sequence[Collection[str]]) -> TrainingGraph | None:
        """The same graph with its layers, given by their variables, in this order; None where it has others.

        Two graphs of one step may number the layers of parallel branches in either order.
        """
        place = {frozenset(variables): number for number, variables in enumerate(layers)}
        own = [frozenset(layer.variables) for layer in self.layers]
        if len(own) != len(layers) or set(own) != place.keys():
            return None
        new = [place[variables] for variables in own]
        numbered = [replace(layer, index=number) for layer, number in zip(self.layers, new, strict=True)]
        return self.with_layers(sorted(numbered, key=lambda layer: layer.index), new)

    def with_layers(self, layers: Iterable[Layer], numbers: Sequence[int]) -> TrainingGraph:
        """Return the same graph with other layers; ``numbers`` are the new ones of the old layers."""
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
