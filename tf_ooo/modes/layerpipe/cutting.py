"""Defines passes that cut a step into rounds, and checks their results.

Each op is in one round, with its type and attributes unchanged.  It reads tensors of its own round directly,
and tensors of earlier rounds from registers; it reads nothing of later rounds.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import data_inputs, split_input
from grappler_passes.errors import VerifyError
from grappler_passes.graph.dependencies import has_side_effects
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, Relaxation, tensor
from tf_ooo.modes.layerpipe.rounds import GIVEN, Rounds

# The names of what is read from outside of a round.
LATE = "_ooo_late"
LOCAL = "_ooo_local"


@dataclass(frozen=True)
class Register:
    """Describes ``depth`` registers in a row for a tensor, ``node:port``, made in round ``made``."""

    number: int
    source: str
    device: str
    made: int
    depth: int

    def name(self, delay: int) -> str:
        """Return the placeholder for the value of so many rounds ago."""
        return late_name(self.number, delay)


def late_name(register: int, delay: int) -> str:
    """Return the placeholder for the value of so many rounds ago in a row of registers."""
    return f"{LATE}/{register}_{delay}"


@dataclass(frozen=True)
class Reads:
    """Says how a node reads: a copy of the step's ``node``, with these inputs, on this device."""

    node: str
    inputs: tuple[str, ...]
    device: str


@dataclass(frozen=True)
class CutPass(Pass):
    """Has each op read tensors of earlier rounds from registers.

    ``reads``: by the node's new name; other nodes are removed.  ``same``: maps reads of one value to the read
    that goes into registers.
    """

    reads: Mapping[str, Reads]
    rounds: Rounds
    registers: tuple[Register, ...]
    same: Mapping[str, str]
    name: ClassVar[str] = "cut"
    relaxes = frozenset(Relaxation)

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Cut the step; registers and copies of frozen weights are given, so they are no nodes."""
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
        """Raise VerifyError unless each op is in one round, unchanged, and reads others by registers."""
        old, new, rounds = _by_name(before), _by_name(result.graph_def), self.rounds
        for name in old.keys() - new.keys() - rounds.frozen:
            raise VerifyError(name, "kept", "it is in no round")
        held = {row.name(delay): (row, delay) for row in self.registers for delay in range(1, row.depth + 1)}
        for name, node in new.items():
            origin = old.get(_original(name))
            if origin is None:
                raise VerifyError(name, "new nodes", "it is not in the step")
            _same_op(node, origin)
            for was, now in zip(data_inputs(origin), data_inputs(node), strict=True):
                own_copy = tensor(_original(split_input(now)[0]), split_input(now)[1])
                if split_input(was)[0] not in rounds.frozen or own_copy != was:
                    self._check_input(name, was, now, held.get(now))
        for first, then in rounds.before:
            if f"^{first}" not in new[then].input:
                raise VerifyError(then, "side effects", f"no longer runs after {first!r}")

    def _check_input(self, name: str, was: str, now: str, held: tuple[Register, int] | None) -> None:
        producer, port = split_input(was)
        since, at = self.rounds.of.get(producer), self.rounds.of.get(name)
        if since is None or since == at:
            if now != was:
                raise VerifyError(name, "data inputs", f"read {was}, reads {now}")
            return
        if at is None or at < since:
            raise VerifyError(name, "rounds", f"in round {at} it reads {was}, which round {since} makes")
        if held is None:
            text = f"reads {now} of round {since} in round {at}, past all registers"
            raise VerifyError(name, "registers", text)
        register, delay = held
        source = tensor(self.same.get(producer, producer), port)
        if (register.source, register.made, delay) != (source, since, at - since):
            text = f"reads {register.source} of {delay} rounds before"
            raise VerifyError(name, "registers", f"is to read {was} of round {since}, {text}")


@dataclass(frozen=True)
class RoundPass(Pass):
    """Keeps the ops of rounds ``low`` to ``high``, and constants, except those that are given."""

    rounds: Rounds
    low: int
    high: int
    given: frozenset[str]
    name: ClassVar[str] = "round"
    relaxes = frozenset({Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS, Relaxation.FEWER_WAITS})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Keep them; control inputs from other ops are dropped."""
        kept = {node.name: node for node in graph_def.node if self._is_in(node.name)}
        part = graph_protos.with_nodes(graph_def, kept.values())
        for node in part.node:
            node.input[:] = _inputs_within(node, kept)
        dropped = frozenset(node.name for node in graph_def.node) - kept.keys()
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
        """Raise VerifyError unless exactly these ops are left, unchanged but for control inputs."""
        old, new = _by_name(before), _by_name(result.graph_def)
        for name in old.keys() | new.keys():
            if (name in new) != (name in old and self._is_in(name)):
                raise VerifyError(name, "rounds", f"is in {'the wrong' if name in new else 'no'} round")
        for name, node in new.items():
            _same_op(node, old[name])
            kept = _inputs_within(old[name], new)
            if list(node.input) != kept:
                raise VerifyError(name, "data inputs", f"is to read {kept}, reads {list(node.input)}")


def _same_op(node: node_def_pb2.NodeDef, origin: node_def_pb2.NodeDef) -> None:
    if node.op != origin.op:
        raise VerifyError(node.name, "op", f"was {origin.op}, is {node.op}")
    for key in {*node.attr, *origin.attr} - {"_class"}:
        if not (key in node.attr and key in origin.attr and node.attr[key] == origin.attr[key]):
            raise VerifyError(node.name, "attributes", f"{key} is not what it was")


def _inputs_within(node: node_def_pb2.NodeDef, names: Container[str]) -> list[str]:
    """Return the inputs without control inputs from other nodes."""
    return [text for text in node.input if text[0] != "^" or text[1:] in names]


def _by_name(graph_def: graph_pb2.GraphDef) -> dict[str, node_def_pb2.NodeDef]:
    nodes: dict[str, node_def_pb2.NodeDef] = {}
    for node in graph_def.node:
        if nodes.setdefault(node.name, node) is not node:
            raise VerifyError(node.name, "rounds", "it is there twice")
    return nodes


def _original(name: str) -> str:
    """Return the op of which a device's own op is a copy."""
    return name.partition(f"/{LOCAL}_")[0]
