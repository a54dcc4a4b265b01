"""Updates that ride on the side stream: part of the call that computes their dW.

A call has one result (XLA waits early for a call of several), so what can ride is what leads from dW to one
tensor: the new weight of plain gradient descent, the new velocity of momentum.  Where a gradient has
several readers (Adam's two moments, a global norm) the update stays on the main stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import node_def_pb2

from grappler_passes.compat import op_types
from grappler_passes.graph.dependencies import reached
from grappler_passes.graph.node_input import split_input
from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation
from tf_ooo.modes.compiled.regions import FlatStep, GraphDef, Port, Region, is_pure, region_of

_ASSIGNMENTS = {"AssignSubVariableOp": "Sub", "AssignAddVariableOp": "AddV2"}
_FLOATS = frozenset({1, 2, 14, 19})  # DT_FLOAT, DT_DOUBLE, DT_BFLOAT16, DT_HALF
_ELEMENTWISE = frozenset(
    {"Mul", "Sub", "Add", "AddV2", "Neg", "RealDiv", "Square", "Sqrt", "Rsqrt", "Maximum", "Minimum", "Cast",
     "Identity", "Reshape", "Sign", "Abs"}
)  # fmt: skip


@dataclass(frozen=True)
class DeadEndsPass(Pass):
    """Drops ops that no result and no state needs: they read gradients, too.  ``fetches``: the results."""

    fetches: Sequence[str]
    name: ClassVar[str] = "dead_ends"
    relaxes = frozenset({Relaxation.REPLACED_NODES})

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Inputs of the graph stay."""
        nodes = {node.name: node for node in graph_def.node}
        wanted = [split_input(text)[0] for text in self.fetches]
        wanted += [
            name for name, node in nodes.items() if op_types.is_stateful(node.op) or node.op == "Placeholder"
        ]
        needed = reached(wanted, lambda name: [split_input(text)[0] for text in nodes[name].input])
        kept = copy_of(graph_def)
        del kept.node[:]
        kept.node.extend(node for node in graph_def.node if node.name in needed)
        dropped = frozenset(nodes.keys() - needed)
        return PassResult(kept, bool(dropped), replaced=dropped)


@dataclass(frozen=True)
class SingleAssignmentPass(Pass):
    """Makes of ``variable -= x`` ``variable = variable - x``: the same to XLA, bit for bit."""

    name: ClassVar[str] = "single_assignment"
    relaxes = frozenset(
        {Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.OPS, Relaxation.SIDE_EFFECTS}
    )

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Split the assignments of floating-point variables."""
        split = copy_of(graph_def)
        chosen = [
            node for node in split.node if node.op in _ASSIGNMENTS and node.attr["dtype"].type in _FLOATS
        ]
        for node in chosen:
            _split(split, node)
        return PassResult(split, bool(chosen), replaced=frozenset(node.name for node in chosen))


def _split(graph_def: GraphDef, node: node_def_pb2.NodeDef) -> None:
    variable, delta, *control = list(node.input)
    before = graph_def.node.add(name=f"{node.name}/ooo_before", op="ReadVariableOp")
    before.input.extend([variable, *control])
    after = graph_def.node.add(name=f"{node.name}/ooo_after", op=_ASSIGNMENTS[node.op])
    after.input.extend([before.name, delta])
    for added, attribute in ((before, "dtype"), (after, "T")):
        added.attr[attribute].type = node.attr["dtype"].type
        added.device = node.device
    node.op = "AssignVariableOp"
    del node.input[:]
    node.input.extend([variable, after.name, *control])


def with_updates(step: FlatStep, graph: TrainingGraph, region: Region) -> Region:
    """Return the region with as much of the update as can ride along; itself where nothing can."""
    if len(region.outputs) != 1:
        return region
    result, taken = region.outputs[0], set()
    while (following := _only_reader(step, graph, result)) is not None:
        more = _early_part(step, graph, following, result)
        if more is None:
            break
        taken |= {following, *more}
        result = (following, 0)
    if not taken:
        return region
    inside = {*region.ops, *taken}
    ops = tuple(name for name in graph.ops if name in inside)
    own = tuple(name for name in graph.ops if name in {*region.own, *taken})
    with_update = region_of(step, ops, own)
    return with_update if with_update.outputs == (result,) else region


def _only_reader(step: FlatStep, graph: TrainingGraph, port: Port) -> str | None:
    """Return the one elementwise op of the update that reads a tensor, of the same shape as the tensor."""
    readers = set(step.readers_of(port))
    if len(readers) != 1 or port in step.fetches:
        return None
    (name,) = readers
    if not _may_ride(step, graph, name):
        return None
    mine, theirs = step.info(port), step.info((name, 0))
    return name if mine is not None and theirs is not None and mine.shape == theirs.shape else None


def _may_ride(step: FlatStep, graph: TrainingGraph, name: str) -> bool:
    op = graph.ops.get(name)
    known = op is not None and op.kind is OpKind.UPDATE and name in step.nodes
    return known and step.nodes[name].op in _ELEMENTWISE and is_pure(step, name)


def _early_part(step: FlatStep, graph: TrainingGraph, name: str, port: Port) -> set[str] | None:
    """Return what else ``name`` is computed from and nothing else needs; None if it waits for backward."""
    operands = [producer for producer, number in step.data_inputs(name) if (producer, number) != port]
    before = (graph.ops.get(name) for name in step.above(operands))
    if any(op is not None and op.kind in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD) for op in before):
        return None
    taken: set[str] = set()
    stack = list(operands)
    while stack:
        producer = stack.pop()
        readers = {reader for reader, _ in step.readers[producer]}
        if producer in taken or not _may_ride(step, graph, producer) or readers - taken - {name}:
            continue
        taken.add(producer)
        stack += [before for before, _ in step.data_inputs(producer)]
    return taken
