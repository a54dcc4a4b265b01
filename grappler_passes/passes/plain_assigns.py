"""Makes an update that adds to a variable compute its new value first, and assign that.

XLA can compile the computation as part of a function, but not an update.  The bits stay: both add the same
two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import control_inputs, data_inputs, split_input, tensor
from grappler_passes.graph.dependencies import GraphIndex, only_reads, users_of_states
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import GraphEditor, PassResult, Relaxation
from grappler_passes.passes.verify import VerifiedPass

_SUMS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
_READ = "ReadVariableOp"
# The op that computes the value which an update assigns has the update's name with this suffix.
SUFFIX = "/tf_ooo_value"


@dataclass(frozen=True)
class PlainAssignsPass(VerifiedPass):
    """Replaces ``AssignAddVariableOp`` and ``AssignSubVariableOp`` if the old value has been read.

    The next reader of the variable gets the assigned value itself.  If a later write depends on that read, as
    with a constraint, that write waits for the read instead.
    """

    name: ClassVar[str] = "plain_assigns"
    relaxes = frozenset(
        {Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.OPS, Relaxation.SIDE_EFFECTS}
    )

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        index, editor = GraphIndex(graph_def), GraphEditor(graph_def)
        replaced: dict[str, str] = {}  # reads of the new value, and the op that computes it
        updates: set[str] = set()
        for update, read, later, writes in _updates(index):
            node = editor.nodes[index.names[update]]
            handle, change = data_inputs(node)
            value = editor.add(
                f"{node.name}{SUFFIX}", _SUMS[node.op], [index.names[read], change], node.device
            )
            value.attr["T"].CopyFrom(node.attr["dtype"])
            for mark, said in node.attr.items():
                if mark.startswith("_ooo_"):
                    value.attr[mark].CopyFrom(said)
            node.op = "AssignVariableOp"
            node.attr["validate_shape"].b = False
            node.input[:] = [handle, value.name, *control_inputs(node)]
            updates.add(node.name)
            replaced.update((index.names[i], value.name) for i in later)
            for write in (index.names[i] for i in writes if later):
                waits = (f"^{index.names[i]}" for i in later)
                editor.set_inputs(write, [*editor.nodes[write].input, *waits])
                updates.add(write)

        def follow(producer: str, port: int) -> list[str]:
            return [tensor(replaced.get(producer, producer) if port == 0 else producer, port)]

        readers = {
            name
            for name, node in editor.nodes.items()
            for text in data_inputs(node)
            if split_input(text)[0] in replaced
        }
        for name in sorted(readers):
            editor.map_inputs(name, follow)
        return PassResult(editor.finish(), bool(updates), (), frozenset(updates | readers))


def _updates(index: GraphIndex) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yield each update that adds, a read of the old value, the reads of the new value, and later writes.

    They are all on one device, outside of loops and branches, with no other write between them.
    """
    for users in users_of_states(index):
        writes = [i for i in users if not only_reads(index.ops[i])]
        reads = [i for i in users if index.ops[i] == _READ and _is_plain(index, i)]
        for update in writes:
            if index.ops[update] not in _SUMS or not _is_plain(index, update):
                continue
            other_writes = [write for write in writes if write != update]
            before = [read for read in reads if index.implied(read, update)]
            old = next((r for r in reversed(before) if _none_between(index, r, update, other_writes)), None)
            if old is not None:
                after = [read for read in reads if index.implied(update, read)]
                later = [r for r in after if _none_between(index, update, r, other_writes)]
                yield update, old, later, [write for write in other_writes if index.implied(update, write)]


def _none_between(index: GraphIndex, first: int, then: int, writes: list[int]) -> bool:
    """Return whether each write surely comes before ``first`` or after ``then``."""
    return all(index.implied(write, first) or index.implied(then, write) for write in writes)


def _is_plain(index: GraphIndex, i: int) -> bool:
    context = index.contexts[i]
    return not (context.frame or context.branches)
