"""Finds what a round reads from rounds before: the registers between the rounds.

A tensor that is made in round a and read in round b > a goes through b - a registers, variables on the
reader's device; at the end of each round every register takes what the one before it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.effects import states_of
from grappler_passes.graph.node_input import split_input
from grappler_passes.passes.base import PassPipeline
from grappler_passes.passes.edit import tensor
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.accesses import accesses
from tf_ooo.modes.layerpipe.cutting import LOCAL, CutPass, Reads, Register, late_name
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced

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
    """Return cuts all edges between rounds.

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


class _Cuts:
    """Finds what each node reads, and ``rows`` of registers for it: (number, depth) by tensor and device."""

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
        """Take note of what a node of a round, or a constant, reads."""
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
        """Return a device's own copy of an op that depends on frozen weights alone."""
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
