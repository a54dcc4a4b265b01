"""Takes apart ops that make dO wait for dW, if no number changes by a bit.

- IdentityN over several gradients: one Identity per output.
- ``tf.tuple`` gates (an Identity that waits for a group of all gradients): the wait goes.
- Fused gradient kernels: cannot be taken apart; a note says why.
- RNN gradient loops: the sum of the weight gradient moves to a loop of its own (``separate_loops``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.classify import FUSED_REASONS
from grappler_passes.compat.graph_protos import control_inputs, data_inputs, split_input
from grappler_passes.errors import GrapplerPassError
from grappler_passes.graph.dependencies import GraphIndex, conflicts, has_side_effects
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import GraphEditor, Note, Pass, PassResult, Relaxation, tensor
from grappler_passes.passes.separate_loops import SeparateLoopsPass


@dataclass(frozen=True)
class SeparatePass(Pass):
    """Separates every op it can; ``result.mixed`` maps each op that stays mixed to the reason."""

    name: ClassVar[str] = "separate"
    relaxes = SeparateLoopsPass.relaxes | {
        Relaxation.COPIES,
        Relaxation.FEWER_WAITS,
        Relaxation.MORE_WAITS,
        Relaxation.NOTES,
    }

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        index = GraphIndex(graph_def)
        editor = GraphEditor(graph_def)
        notes = [*_split_identity_n(index, editor), *_open_gates(index, editor), *_fused(index)]
        loops = SeparateLoopsPass()(editor.finish(), training_graph)
        notes += loops.notes
        after, modified = loops.graph_def, editor.modified or loops.modified
        if modified:
            notes += _restore_orders(index, after)
        return PassResult(after, modified, tuple(notes), loops.replaced | editor.removed)


def _split_identity_n(index: GraphIndex, editor: GraphEditor) -> list[Note]:
    notes = []
    for i, name in enumerate(index.names):
        if index.ops[i] != "IdentityN" or len(index.data_preds[i]) < 2:
            continue
        if len({index.contexts[p].branches for p, _ in index.data_preds[i]}) > 1:
            # A dead input makes all outputs dead; apart, the others would come alive.
            notes.append(Note("mixed", "its inputs lie in different branches of a conditional", (name,)))
            continue
        _split(index, editor, i)
        notes.append(Note("done", "split into one Identity per output", (name,)))
    return notes


def _split(index: GraphIndex, editor: GraphEditor, i: int) -> None:
    old = editor.nodes[index.names[i]]
    data, control = data_inputs(old), control_inputs(old)
    parts = [f"{old.name}/ooo_{k}" for k in range(len(data))]
    for k, (part, text) in enumerate(zip(parts, data, strict=True)):
        node = editor.add(part, "Identity", [text, *control], old.device)
        node.attr["T"].type = old.attr["T"].list.type[k]

    def replace(producer: str, port: int) -> list[str]:
        if producer != old.name:
            return [tensor(producer, port)]
        return [parts[port]] if port >= 0 else [f"^{part}" for part in parts]

    consumers = {index.names[s] for s in index.succs[i]}
    # An IdentityN split earlier may have been a consumer: its parts read this one as well.
    consumers |= {
        name
        for name in editor.added
        if any(split_input(text)[0] == old.name for text in editor.nodes[name].input)
    }
    for consumer in consumers - editor.removed:
        editor.map_inputs(consumer, replace)
    editor.removed.add(old.name)


def _open_gates(index: GraphIndex, editor: GraphEditor) -> list[Note]:
    notes = []
    for i, name in enumerate(index.names):
        if index.ops[i] != "Identity" or not index.control_preds[i]:
            continue
        waits = _gate_waits(index, i)
        if not waits:
            continue
        gone = {f"^{index.names[w]}" for w in waits}
        editor.set_inputs(name, [text for text in editor.nodes[name].input if text not in gone])
        editor.opened.add(name)
        notes.append(Note("done", "no longer waits for the other gradients of its group", (name,)))
    return notes


def _gate_waits(index: GraphIndex, i: int) -> list[int]:
    """Return the control predecessors of Identity ``i`` that only gate it with its siblings.

    They are a NoOp that waits for its tensor among others or, once inlined, the siblings' producers.
    """
    producer = index.data_preds[i][0][0]
    waits = []
    for wait in index.control_preds[i]:
        if index.ops[wait] == "NoOp":
            members = _group_members(index, wait)
            gate = producer in members and len(members) > 1
        else:
            members = {wait}
            gate = any(_is_sibling(index, s, wait, producer) for s in index.succs[wait])
        if gate and not any(_must_wait(index, m, producer) for m in members):
            waits.append(wait)
    return waits


def _group_members(index: GraphIndex, group: int) -> set[int]:
    """Return the ops that a NoOp waits for; a group over several devices is a group of groups."""
    members: set[int] = set()
    for pred in index.control_preds[group]:
        members |= _group_members(index, pred) if index.ops[pred] == "NoOp" else {pred}
    return members


def _is_sibling(index: GraphIndex, other: int, wait: int, producer: int) -> bool:
    """Tell whether Identity ``other`` hands on ``wait`` and waits for ``producer``: both are one gate."""
    return (
        index.ops[other] == "Identity"
        and wait != producer
        and index.data_preds[other][0][0] == wait
        and producer in index.control_preds[other]
    )


def _must_wait(index: GraphIndex, member: int, producer: int) -> bool:
    """Tell whether an op must be waited for: it has side effects, or can be dead on its own."""
    there, here = index.contexts[member], index.contexts[producer]
    return (
        has_side_effects(index.ops[member])
        or there.output_frame != here.output_frame
        or not there.branches <= here.branches
    )


def _fused(index: GraphIndex) -> list[Note]:
    notes = []
    for i, name in enumerate(index.names):
        reason = FUSED_REASONS.get(index.ops[i])
        if reason is None:
            continue
        used = {port for s in index.succs[i] for p, port in index.data_preds[s] if p == i}
        if used - {0}:  # a frozen layer's gradient is output 0 alone
            notes.append(Note("mixed", reason, (name,)))
    return notes


def _restore_orders(index: GraphIndex, after: graph_pb2.GraphDef) -> list[Note]:
    """Give an edge of its own to each order of side effects that hung on a wait which is now gone."""
    new = GraphIndex(after)
    nodes = {node.name: node for node in after.node}
    notes = []
    for first, then in conflicts(index):
        earlier, later = index.names[first], index.names[then]
        if new.implied(earlier, later):
            continue
        if reason := index.context_conflict(first, then):
            raise GrapplerPassError(f"cannot keep {later!r} after {earlier!r}: {reason}")
        nodes[later].input.append(f"^{earlier}")
        notes.append(Note("done", "an order of side effects is now an edge of its own", (earlier, later)))
    return notes
