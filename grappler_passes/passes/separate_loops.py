"""Moves the sum of an RNN's weight gradients out of the loop that computes dO.

The gradient loop of an RNN computes, step by step, dO and ``total = total + dW(step)``; the layers
below wait for dW of all steps.  Here the nodes that serve only such sums move to a second loop.  The
first loop stores what they read of each step in a list; the second reads the lists and makes the same
additions in the same order, so no bit changes.  The price is memory: a dO of each step stays alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, types_pb2

from grappler_passes.analysis.loops import Accumulator, Loop, accumulator_of, find_loops, obstacle, only_for
from grappler_passes.compat import shape_inference
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from grappler_passes.passes.base import Note, Pass, PassResult
from grappler_passes.passes.edit import GraphEditor
from grappler_passes.passes.loop_split import LoopSplit
from grappler_passes.passes.relaxations import Relaxation

_FLOATS = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE)


@dataclass(frozen=True)
class SeparateLoopsPass(Pass):
    """Splits every gradient loop that can be split; a note for each that stays mixed.

    Without a training graph every floating-point sum of a loop that pops stacks counts as a weight gradient.
    """

    name: ClassVar[str] = "separate_loops"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Split the loops of a copy."""
        index = GraphIndex(graph_def)
        if not index.back_preds:
            return PassResult(graph_def, False)
        editor = GraphEditor(graph_def)
        notes: list[Note] = []
        replaced: set[str] = set()
        dtypes: dict[str, tuple[str, ...]] = {}
        for loop in find_loops(index):
            sums = _weight_sums(index, editor, loop, training_graph)
            if not sums:
                continue
            moved = only_for(index, loop, {s.exit for s in sums})
            reason = obstacle(index, loop, sums, moved)
            if not reason:
                dtypes = dtypes or _dtypes(graph_def)
                split = LoopSplit(index, editor, loop, moved, dtypes)
                reason = split.plan()
            ends = tuple(index.names[s.exit] for s in sums)
            if reason:
                notes.append(Note("mixed", reason, ends))
                continue
            split.apply()
            replaced |= {index.names[i] for i in moved}
            notes.append(Note("done", "the weight gradient's sum moved to a loop of its own", ends))
        return PassResult(editor.finish(), editor.modified, tuple(notes), frozenset(replaced))


def _weight_sums(
    index: GraphIndex, editor: GraphEditor, loop: Loop, training_graph: TrainingGraph | None
) -> list[Accumulator]:
    """The weight gradients summed in a loop that also computes something the rest waits for."""
    exits = loop.exits(index)
    sums = [
        s
        for s in (accumulator_of(index, loop, end) for end in exits)
        if s is not None and editor.nodes[index.names[s.merge]].attr["T"].type in _FLOATS
    ]
    if training_graph is not None:
        weight_grads = set(training_graph.of_kind(OpKind.WEIGHT_GRAD))
        sums = [s for s in sums if index.names[s.exit] in weight_grads]
    elif not any(index.ops[i] == "TensorListPopBack" for i in loop.members):
        return []
    return sums if len(sums) < len(exits) else []


def _dtypes(graph_def: graph_pb2.GraphDef) -> dict[str, tuple[str, ...]]:
    outputs_of = shape_inference.infer_outputs(graph_def)
    return {name: tuple(info.dtype for info in outputs) for name, outputs in outputs_of.items()}
