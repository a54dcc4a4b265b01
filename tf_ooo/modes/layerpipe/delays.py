"""What a round reads that was made in rounds before: the registers between the rounds.

A tensor that is made in round a and read in round b > a goes through b - a registers, variables on the
reader's device; at the end of each round every register takes what the one before it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.errors import VerifyError
from grappler_passes.graph.effects import has_side_effects, states_of
from grappler_passes.graph.node_input import split_input
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassPipeline, PassResult
from grappler_passes.passes.edit import tensor
from grappler_passes.passes.relaxations import Relaxation
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.accesses import accesses
from tf_ooo.modes.layerpipe.rounds import GIVEN, Rounds
from tf_ooo.modes.layerpipe.traced import Traced
from tf_ooo.modes.layerpipe.verify_rounds import LOCAL, Register, late_name, verify_cut, verify_part

_NOT_STORED = ("resource", "variant")


@dataclass(frozen=True)
class Delays:
    """A step, each op with inputs from registers, which are given.

    ``copies``: ``{placeholder: (handle, device, OutputInfo)}`` of frozen weights, as a device reads them.
    ``logs``: the tensor of each result of the step, all for one batch in ``logs_round``.
    """

    graph_def: graph_pb2.GraphDef
    registers: list[Register] = field(default_factory=list)
    copies: dict[str, tuple[str, str, OutputInfo]] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    logs_round: int = 0


def delays_of(traced: Traced, rounds: Rounds) -> Delays:
    """Cuts all edges between rounds.

    Raises GraphError for a tensor that cannot be stored, such as a list, and is read in a later round.
    """
    cuts = _Cuts(traced, rounds)
    for node in traced.graph_def.node:
        cuts.take(node)
    logs_round = max((rounds.of.get(split_input(t)[0], 0) for t in traced.fetches), default=rounds.batch)
    logs = [cuts.read(*split_input(text), logs_round, None) for text in traced.fetches]
    registers = [
        Register(number, tensor(*source), device, rounds.of[source[0]], depth)
        for (source, device), (number, depth) in cuts.rows.items()
    ]
    change = CutPass(cuts.reads, rounds, tuple(registers), cuts.same)
    cut = PassPipeline([change], traced.dump_dir, traced.ran)(traced.graph_def)
    return Delays(cut.graph_def, registers, cuts.copies, logs, logs_round)


@dataclass(frozen=True)
class Reads:
    """How a node is to read: a copy of the step's ``node``, with these inputs, on this device."""

    node: str
    inputs: tuple[str, ...]
    device: str


@dataclass(frozen=True)
class CutPass(Pass):
    """Has each op read what earlier rounds made from registers; what must hold is in ``verify_rounds``.

    ``reads``: by the name that the node then has; other nodes go.  ``same``: reads of one value, and which of
    them goes into registers.
    """

    reads: Mapping[str, Reads]
    rounds: Rounds
    registers: tuple[Register, ...]
    same: Mapping[str, str]
    name: ClassVar[str] = "cut"
    relaxes = frozenset(Relaxation)

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Registers and copies of frozen weights are no nodes: they are given."""
        nodes = {node.name: node for node in graph_def.node}
        cut = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
        for name, reads in self.reads.items():
            node = cut.node.add()
            node.CopyFrom(nodes[reads.node])
            node.name, node.device = name, reads.device
            node.input[:] = reads.inputs
            node.attr.pop("_class", None)
        return PassResult(cut, True)

    def postconditions(
        self, before: graph_pb2.GraphDef, result: PassResult, training_graph: TrainingGraph | None
    ) -> None:
        """Raise VerifyError unless each op is in one round, as it was, and reads no other round but so."""
        verify_cut(before, result.graph_def, self.rounds, self.registers, self.same)


class _Cuts:
    """What each node reads, and the ``rows`` of registers for it: (number, depth) by tensor and device."""

    def __init__(self, traced: Traced, rounds: Rounds) -> None:
        self.traced, self.rounds = traced, rounds
        self.reads: dict[str, Reads] = {}
        self.rows: dict[tuple[tuple[str, int], str], tuple[int, int]] = {}
        self.controls: dict[str, list[str]] = {}
        self.same = _same_reads(traced, rounds)
        self.frozen = {node.name: node for node in traced.graph_def.node if node.name in rounds.frozen}
        self.local: dict[tuple[str, str], str] = {}
        self.copies: dict[str, tuple[str, str, OutputInfo]] = {}
        for first, then in rounds.before:
            self.controls.setdefault(then, []).append(first)

    def take(self, node: node_def_pb2.NodeDef) -> None:
        """What a node of a round, or a constant, reads."""
        name = node.name
        if name in self.frozen:
            return
        device = self.rounds.device_of.get(name, "")
        inputs = self._inputs(node, self.rounds.of.get(name), device)
        inputs += [f"^{first}" for first in dict.fromkeys(self.controls.get(name, ()))]
        self.reads[name] = Reads(name, tuple(inputs), device)

    def _inputs(self, node: node_def_pb2.NodeDef, at: int | None, device: str) -> list[str]:
        ports = map(split_input, node.input)
        return [self.read(producer, port, at, device) for producer, port in ports if port >= 0]

    def read(self, producer: str, port: int, at: int | None, device: str | None) -> str:
        """The input to have for a tensor that is read in round ``at``."""
        if producer in self.frozen:
            return tensor(self._on(device or "", producer), port)
        if at is None or self.rounds.of.get(producer, at) == at:
            return tensor(producer, port)
        delay = at - self.rounds.of[producer]
        producer = self.same.get(producer, producer)
        info = self.traced.outputs[producer][port]
        if info.dtype in _NOT_STORED:
            raise GraphError(
                f"{producer!r} makes a {info.dtype}, which later rounds would read; recurrent layers can be "
                "spread with unroll=True"
            )
        devices = self.rounds.device_of
        where = device or devices.get(producer) or next(iter(devices.values()))  # an input is on no device
        key = ((producer, port), where)
        register, depth = self.rows.setdefault(key, (len(self.rows), 0))
        self.rows[key] = register, max(depth, delay)
        return late_name(register, delay)

    def _on(self, device: str, name: str) -> str:
        """A device's own copy of an op that depends on frozen weights alone."""
        if (name, device) in self.local:
            return self.local[name, device]
        node, copy = self.frozen[name], f"{name}/{LOCAL}_{len(self.local)}"
        self.local[name, device] = copy
        if node.op == "ReadVariableOp":
            index = self.traced.index
            handle = next(iter(states_of(index, index.index[name])))
            self.copies[copy] = handle, device, self.traced.outputs[name][0]
        else:
            self.reads[copy] = Reads(name, tuple(self._inputs(node, None, device)), device)
        return copy


def _same_reads(traced: Traced, rounds: Rounds) -> dict[str, str]:
    """Reads of one variable in one round with no write between them: all as the first."""
    first: dict[tuple[frozenset[str], int, int], str] = {}
    same: dict[str, str] = {}
    writes: dict[str, int] = {}
    for access in accesses(traced.index):
        if access.name not in rounds.of:
            continue
        if access.writes:
            writes |= {state: writes.get(state, 0) + 1 for state in access.states}
        elif access.op == "ReadVariableOp":
            since = sum(writes.get(state, 0) for state in access.states)
            key = access.states, since, rounds.of[access.name]
            same[access.name] = first.setdefault(key, access.name)
    return same


@dataclass(frozen=True)
class RoundPass(Pass):
    """Keeps the ops of rounds ``low`` to ``high``, and constants, but for those that are given."""

    rounds: Rounds
    low: int
    high: int
    given: frozenset[str]
    name: ClassVar[str] = "round"
    relaxes = frozenset({Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS, Relaxation.FEWER_WAITS})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Control inputs from others are dropped."""
        part = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
        kept = {node.name for node in graph_def.node if self._is_in(node.name)}
        for node in graph_def.node:
            if node.name in kept:
                copy = part.node.add()
                copy.CopyFrom(node)
                copy.input[:] = [text for text in node.input if text[0] != "^" or text[1:] in kept]
        dropped = frozenset(node.name for node in graph_def.node if node.name not in kept)
        return PassResult(part, bool(dropped), replaced=dropped)

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        """Raise VerifyError for an op with side effects that is in no round."""
        for node in graph_def.node:  # it would run in all
            if node.name not in self.rounds.of and has_side_effects(node.op) and node.op not in GIVEN:
                raise VerifyError(node.name, "rounds", f"a {node.op} is in no round")

    def _is_in(self, name: str) -> bool:
        return self.low <= self.rounds.of.get(name, self.low) <= self.high and name not in self.given

    def postconditions(
        self, before: graph_pb2.GraphDef, result: PassResult, training_graph: TrainingGraph | None
    ) -> None:
        """Raise VerifyError unless just these ops are there, as they were."""
        verify_part(before, result.graph_def, self._is_in)
