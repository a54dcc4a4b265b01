"""What must hold of a step that is cut into rounds.

Each op is in one round, with the type and the attributes that it had.  It reads what its own round makes as
it did, and what an earlier round has made from a register; nothing that comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.errors import VerifyError
from grappler_passes.graph.node_input import split_input
from grappler_passes.passes.edit import tensor
from tf_ooo.modes.layerpipe.rounds import Rounds

# The names of what is read from outside of a round.
LATE = "_ooo_late"
LOCAL = "_ooo_local"


@dataclass(frozen=True)
class Register:
    """A row of ``depth`` registers, for a tensor, ``node:port``, that is made in round ``made``."""

    number: int
    source: str
    device: str
    made: int
    depth: int

    def name(self, delay: int) -> str:
        """The placeholder for what was made so many rounds ago."""
        return late_name(self.number, delay)


def late_name(register: int, delay: int) -> str:
    """The placeholder for what a row of registers holds of so many rounds ago."""
    return f"{LATE}/{register}_{delay}"


def verify_cut(
    before: graph_pb2.GraphDef,
    after: graph_pb2.GraphDef,
    rounds: Rounds,
    registers: Sequence[Register],
    same: Mapping[str, str],
) -> None:
    """Raise VerifyError, naming op and rule, for a step that is cut; registers are given from outside.

    ``same``: the reading that goes into registers in place of another of the same value.
    """
    held = {row.name(delay): (row, delay) for row in registers for delay in range(1, row.depth + 1)}
    old = {node.name: node for node in before.node}
    new = _by_name(after)
    for name in old.keys() - new.keys() - rounds.frozen:
        raise VerifyError(name, "kept", "it is in no round")
    for name, node in new.items():
        origin = old.get(_original(name))
        if origin is None:
            raise VerifyError(name, "new nodes", "it is not in the step")
        _same_op(node, origin)
        data = ([text for text in n.input if text[0] != "^"] for n in (origin, node))
        for was, now in zip(*data, strict=True):
            own_copy = tensor(_original(split_input(now)[0]), split_input(now)[1])
            if split_input(was)[0] not in rounds.frozen or own_copy != was:
                _check_input(name, was, now, rounds, held, same)
    for first, then in rounds.before:
        if f"^{first}" not in new[then].input:
            raise VerifyError(then, "side effects", f"no longer runs after {first!r}")


def _check_input(
    name: str,
    was: str,
    now: str,
    rounds: Rounds,
    held: Mapping[str, tuple[Register, int]],
    same: Mapping[str, str],
) -> None:
    producer, port = split_input(was)
    since, at = rounds.of.get(producer), rounds.of.get(name)
    if since is None or since == at:
        if now != was:
            raise VerifyError(name, "data inputs", f"read {was}, reads {now}")
        return
    if at is None or at < since:
        raise VerifyError(name, "rounds", f"in round {at} it reads {was}, which round {since} makes")
    register, delay = held.get(now, (None, 0))
    if register is None:
        raise VerifyError(
            name, "registers", f"reads {now} of round {since} in round {at}, past all registers"
        )
    source = tensor(same.get(producer, producer), port)
    if (register.source, register.made, delay) != (source, since, at - since):
        held_text = f"{register.source} of {delay} rounds before"
        raise VerifyError(name, "registers", f"is to read {was} of round {since}, reads {held_text}")


def verify_part(
    before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, belongs: Callable[[str], bool]
) -> None:
    """Raise VerifyError unless ``after`` has the ops that belong to it as they were, and no others.

    Control inputs from ops that are not in it may go.
    """
    old, new = _by_name(before), _by_name(after)
    for name in old.keys() | new.keys():
        if (name in new) != (belongs(name) and name in old):
            raise VerifyError(name, "rounds", "is in the wrong round" if name in new else "is in no round")
    for name, node in new.items():
        _same_op(node, old[name])
        kept = [text for text in old[name].input if text[0] != "^" or text[1:] in new]
        if list(node.input) != kept:
            raise VerifyError(name, "data inputs", f"is to read {kept}, reads {list(node.input)}")


def _same_op(node: node_def_pb2.NodeDef, origin: node_def_pb2.NodeDef) -> None:
    if node.op != origin.op:
        raise VerifyError(node.name, "op", f"was {origin.op}, is {node.op}")
    for key in {*node.attr, *origin.attr} - {"_class"}:
        if not (key in node.attr and key in origin.attr and node.attr[key] == origin.attr[key]):
            raise VerifyError(node.name, "attributes", f"{key} is not what it was")


def _by_name(graph_def: graph_pb2.GraphDef) -> dict[str, node_def_pb2.NodeDef]:
    nodes = {node.name: node for node in graph_def.node}
    if len(nodes) != len(graph_def.node):
        names = [node.name for node in graph_def.node]
        twice = next(name for name in names if names.count(name) > 1)
        raise VerifyError(twice, "rounds", "it is there twice")
    return nodes


def _original(name: str) -> str:
    """Of a device's own copy of an op."""
    return name.partition(f"/{LOCAL}_")[0]
