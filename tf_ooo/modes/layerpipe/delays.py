"""What a round reads that was made in rounds before: the registers between the rounds.

A tensor that is made in round a and read in round b > a goes through b - a registers, variables on the
reader's device; at the end of each round every register takes what the one before it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from grappler_passes.graph.effects import only_reads, states_of
from grappler_passes.graph.node_input import split_input
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced

LATE = "_ooo_late"
LOCAL = "_ooo_local"
_NOT_STORED = ("resource", "variant")


@dataclass(frozen=True)
class Register:
    """A row of registers.

    Attributes:
        source: the tensor that goes in, ``node:port``.
        device: where they are.
        made: the round in which the tensor is made.
        depth: how many.
    """

    number: int
    source: str
    device: str
    made: int
    depth: int

    def name(self, delay: int) -> str:
        """The placeholder for what was made so many rounds ago."""
        return f"{LATE}/{self.number}_{delay}"


@dataclass
class Delays:
    """All registers of a step.

    Attributes:
        nodes: the step's nodes by name, with inputs from registers.
        registers: in order.
        copies: ``{placeholder: (handle, device, OutputInfo)}`` of frozen weights, as a device reads them.
        logs: the tensor of each result of the step, all for one batch in ``logs_round``.
    """

    nodes: dict[str, Any] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    copies: dict[str, tuple[str, str, Any]] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    logs_round: int = 0


def delays_of(traced: Traced, rounds: Rounds) -> Delays:
    """Cuts all edges between rounds.

    Raises:
        GraphError: a tensor that cannot be stored, such as a list, is read in a later round.
    """
    maker = _Maker(traced, rounds)
    for node in traced.graph_def.node:
        maker.take(node)
    logs_round = max((rounds.of.get(split_input(t)[0], 0) for t in traced.fetches), default=rounds.batch)
    logs = [maker.read(*split_input(text), logs_round, None) for text in traced.fetches]
    registers = [
        Register(number, _text(*key[0]), key[1], rounds.of[key[0][0]], depth)
        for number, (key, depth) in enumerate(maker.depths.items())
    ]
    return Delays(maker.nodes, registers, maker.copies, logs, logs_round)


class _Maker:
    def __init__(self, traced: Traced, rounds: Rounds) -> None:
        self.traced, self.rounds = traced, rounds
        self.nodes: dict[str, Any] = {}
        self.depths: dict[Any, int] = {}
        self.numbers: dict[Any, int] = {}
        self.controls: dict[str, list[str]] = {}
        self.same = _same_reads(traced, rounds)
        self.frozen = {node.name: node for node in traced.graph_def.node if node.name in rounds.frozen}
        self.local: dict[tuple[str, str], str] = {}
        self.copies: dict[str, tuple[str, str, Any]] = {}
        for first, then in rounds.before:
            self.controls.setdefault(then, []).append(first)

    def take(self, node: Any) -> None:
        """Copies a node, with what it reads of earlier rounds from registers."""
        name = node.name
        if name in self.frozen:
            return
        made = _without_inputs(node)
        made.device = self.rounds.device_of.get(name, "")
        for text in node.input:
            producer, port = split_input(text)
            if port < 0:
                continue
            made.input.append(self.read(producer, port, self.rounds.of.get(name), made.device))
        made.input.extend(f"^{first}" for first in dict.fromkeys(self.controls.get(name, ())))
        self.nodes[name] = made

    def read(self, producer: str, port: int, at: int | None, device: str | None) -> str:
        """The input to have for a tensor that is read in round ``at``."""
        if producer in self.frozen:
            return _text(self.on(device or "", producer), port)
        if at is None or producer not in self.rounds.of:
            return _text(producer, port)
        delay = at - self.rounds.of[producer]
        if delay == 0:
            return _text(producer, port)
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
        self.numbers.setdefault(key, len(self.numbers))
        self.depths[key] = max(self.depths.get(key, 0), delay)
        return f"{LATE}/{self.numbers[key]}_{delay}"

    def on(self, device: str, name: str) -> str:
        """A device's own copy of an op that depends on frozen weights alone."""
        if (name, device) in self.local:
            return self.local[name, device]
        node, copy = self.frozen[name], f"{name}/{LOCAL}_{len(self.local)}"
        self.local[name, device] = copy
        index = self.traced.index
        if node.op == "ReadVariableOp":
            handle = next(iter(states_of(index, index.index[name])))
            self.copies[copy] = handle, device, self.traced.outputs[name][0]
            return copy
        made = _without_inputs(node)
        made.name, made.device = copy, device
        for text in node.input:
            producer, port = split_input(text)
            if port >= 0:
                made.input.append(self.read(producer, port, None, device))
        self.nodes[copy] = made
        return copy


def _without_inputs(node: Any) -> Any:
    made = type(node)()
    made.CopyFrom(node)
    del made.input[:]
    made.attr.pop("_class", None)
    return made


def _same_reads(traced: Traced, rounds: Rounds) -> dict[str, str]:
    """Reads of one variable in one round with no write between them: all as the first."""
    index = traced.index
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    writes: dict[str, int] = {}
    for i in index.order:
        name = index.names[i]
        if name not in rounds.of or index.ops[i] not in ("ReadVariableOp",):
            if (
                name in rounds.of
                and index.ops[i].startswith(("Assign", "Resource"))
                and not only_reads(index.ops[i])
            ):
                for state in states_of(index, i):
                    writes[state] = writes.get(state, 0) + 1
            continue
        state = next(iter(states_of(index, i)))
        same[name] = first.setdefault((state, writes.get(state, 0), rounds.of[name]), name)
    return same


def _text(producer: str, port: int) -> str:
    return producer if port == 0 else f"{producer}:{port}"


def nodes_between(
    delays: Delays, rounds: Rounds, low: int, high: int, given: Collection[str]
) -> Iterable[Any]:
    """Copies of the nodes of these rounds, and of constants, but for those that are given.

    Control inputs from others are dropped.
    """
    kept = {name for name in delays.nodes if low <= rounds.of.get(name, low) <= high and name not in given}
    for name in kept:
        node = delays.nodes[name]
        made = type(node)()
        made.CopyFrom(node)
        inputs = [text for text in node.input if text[0] != "^" or text[1:] in kept]
        del made.input[:]
        made.input.extend(inputs)
        yield made
