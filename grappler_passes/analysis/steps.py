"""Tells apart the steps of an unrolled graph or a step's micro-batches; gives each as a graph of its own.

Whoever unrolls steps marks the nodes of step t with :data:`STEP_ATTR` and puts their names into a scope
``tf_ooo_step_t``.  Micro-batch m is marked as step m.  What runs once, after all micro-batches, is marked as
the step behind the last, and the sums of gradients carry :data:`SUM_ATTR`.  Where a step updates some weights
and then goes on with the new ones, :data:`TURN_ATTR` says after how many updates a node comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import (
    control_inputs,
    data_inputs,
    make_identity,
    split_input,
    tensor,
)
from grappler_passes.graph.dependencies import GraphIndex, reached
from grappler_passes.graph.training_graph import Op, TrainingGraph


def with_inputs(
    index: GraphIndex, nodes: Iterable[int], reads: Callable[[int], Iterable[int]] | None = None
) -> set[int]:
    """Return nodes with all that they are computed from, whole loops too; ``reads`` names producers."""

    def producers(i: int) -> list[int]:
        read = (p for p, _ in index.data_preds[i]) if reads is None else reads(i)
        return [*read, *index.back_preds.get(i, ())]

    return reached(nodes, producers)


def part_of(graph_def: graph_pb2.GraphDef, index: GraphIndex, members: Collection[int]) -> graph_pb2.GraphDef:
    """Return the graph of these nodes, in order, without control edges from others; it keeps the library."""
    part = graph_protos.with_nodes(graph_def, (graph_def.node[i] for i in sorted(members)))
    for i, node in zip(sorted(members), part.node, strict=True):
        if outside := {f"^{index.names[p]}" for p in index.control_preds[i] if p not in members}:
            node.input[:] = [text for text in node.input if text not in outside]
    return part


STEP_ATTR = "_ooo_step"
STEP_SCOPE = "tf_ooo_step_"
SUM_ATTR = "_ooo_sum"
TURN_ATTR = "_ooo_turn"
_CONCAT = ("ConcatV2", "Concat")
_SUMS = ("AddV2", "Add", "AddN", *_CONCAT)
_IN_SCOPE = re.compile(rf"(?:^|/){STEP_SCOPE}(\d+)(?:/|$)")


def steps_of(graph_def: graph_pb2.GraphDef, index: GraphIndex | None = None) -> list[int | None]:
    """Return the step of each node; None for a node that belongs to no step, or to all.

    A node without a mark (graph optimizers make some) belongs to the latest step of its inputs.
    """
    index = index or GraphIndex(graph_def)
    steps = [_marked(node) for node in graph_def.node]
    for i in index.order:
        if steps[i] is None:
            above = [step for p in index.preds(i) if (step := steps[p]) is not None]
            steps[i] = max(above, default=None)
    return steps


def _marked(node: node_def_pb2.NodeDef) -> int | None:
    if STEP_ATTR in node.attr:
        return int(node.attr[STEP_ATTR].i)
    match = _IN_SCOPE.search(node.name)
    return int(match[1]) if match else None


def turns_of(
    graph_def: graph_pb2.GraphDef, index: GraphIndex, steps: Sequence[int | None], count: int
) -> list[int]:
    """Return the turn of each node: how many of the step's updates come before it.

    A node without a mark (from an inlined function) belongs to the latest turn of its inputs. If it reads
    what runs once, as an update does (``count`` in ``steps``), it belongs to the turn behind that one.
    """
    turns = [int(node.attr[TURN_ATTR].i) if TURN_ATTR in node.attr else None for node in graph_def.node]
    if not any(turns):
        return [0] * len(turns)
    known: list[int] = [turn or 0 for turn in turns]
    for i in index.order:
        if turns[i] is None:
            known[i] = max((known[p] + (steps[p] == count != steps[i]) for p in index.preds(i)), default=0)
    return known


def split_steps(graph_def: graph_pb2.GraphDef) -> list[graph_pb2.GraphDef]:
    """Return one graph for each step, the earliest first: its nodes and the data they are computed from.

    Control edges from other steps are left out: each reads variables as if it were the first.
    """
    index = GraphIndex(graph_def)
    steps = steps_of(graph_def, index)
    by_step: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        if step is not None:
            by_step.setdefault(step, []).append(i)
    return [part_of(graph_def, index, with_inputs(index, by_step[step])) for step in sorted(by_step)]


def is_sum(node: node_def_pb2.NodeDef) -> bool:
    """Return whether a node adds the gradients of micro-batches."""
    return SUM_ATTR in node.attr and node.op in _SUMS


def microbatch_graph(
    graph_def: graph_pb2.GraphDef, index: GraphIndex, steps: Sequence[int | None], number: int, count: int
) -> graph_pb2.GraphDef:
    """Return the graph of a step that has only micro-batch ``number``; its nodes keep their names.

    Each sum becomes an Identity of this micro-batch's gradient, or a concat of its parts; control edges from
    nodes that are left out go.  ``count`` is the number in ``steps`` of the nodes that run once.
    """
    # A constant that a sum of slices needs carries the mark too, and hands on nothing.
    sums = {i for i, node in enumerate(graph_def.node) if is_sum(node) and data_inputs(node)}
    every = {i: _handed_on(graph_def.node[i], index, sums, steps, number) for i in sums}
    handed_on = {i: sources for i, sources in every.items() if sources is not None}

    def reads(i: int) -> list[int]:
        if i in handed_on:
            return [index.index[split_input(source)[0]] for source in handed_on[i]]
        return [producer for producer, _ in index.data_preds[i]]

    # Sums come along with their readers: sums of other replicas lead to no gradient of this micro-batch.
    chosen = [i for i, step in enumerate(steps) if step in (number, count) and i not in sums]
    graph = part_of(graph_def, index, with_inputs(index, chosen, reads))
    for node in graph.node:
        sources = handed_on.get(index.index[node.name])
        if sources is None:
            continue
        controls = control_inputs(node)
        if len(sources) == 1:
            make_identity(node, [*sources, *controls])
        else:
            node.input[:] = [*sources, *controls]
            node.attr["N"].i = len(sources) - 1
    return graph


def _handed_on(
    node: node_def_pb2.NodeDef,
    index: GraphIndex,
    sums: Collection[int],
    steps: Sequence[int | None],
    number: int,
) -> list[str] | None:
    """Return the inputs of a sum that lead to this micro-batch's gradient; None if the sum stands before it.

    Where the sums of replicas are added up, the input kept is that of the replica which has the micro-batch.
    TensorFlow merges a concat of concats into one: a table that is looked up twice gives a micro-batch's rows
    in two parts, and the sum keeps both, with its axis.
    """
    inputs, axis = list(data_inputs(node)), []
    if node.op in _CONCAT:
        axis = [inputs.pop(-1 if node.op == "ConcatV2" else 0)]
    producers = [index.index[split_input(text)[0]] for text in inputs]
    pairs = list(zip(inputs, producers, strict=True))
    own = [text for text, producer in pairs if producer not in sums and steps[producer] == number]
    if len(own) > 1 and axis:
        return [*own, *axis] if node.op == "ConcatV2" else [*axis, *own]
    if own:
        return own[:1]
    step = steps[index.index[node.name]]
    if step is None or step <= number:
        return None
    before = [text for text, producer in pairs if producer in sums]
    here = [text for text, producer in pairs if producer in sums and steps[producer] == number]
    return [*here, *before, inputs[0]][:1]


def classify_steps(graphs: Sequence[graph_pb2.GraphDef]) -> list[TrainingGraph]:
    """Classify each of the graphs of ``split_steps``; GraphError if one is no training step.

    A step that differs from the one before only in scope, marks and batch is not classified again: its names
    are replaced, which is faster.  The first steps differ: they hold what several steps have in common.
    """
    classified: list[TrainingGraph] = []
    for number, graph_def in enumerate(graphs):
        names = _renamed(graphs[number - 1], graph_def, number) if number else None
        same = None if names is None else _with_names(classified[-1], names)
        classified.append(same or classify_graph_def(graph_def))
    return classified


def _renamed(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, number: int) -> Mapping[str, str] | None:
    """Return the name in ``after`` of each node of ``before``, if nothing else differs."""
    if len(before.node) != len(after.node):
        return None
    old, new = f"{STEP_SCOPE}{number - 1}/", f"{STEP_SCOPE}{number}/"
    batch = dict(zip(_batch(before), _batch(after), strict=False))
    names = {node.name: batch.get(node.name, node.name.replace(old, new)) for node in before.node}
    nodes = {node.name: node for node in after.node}
    pairs = ((node, nodes.get(names[node.name])) for node in before.node)
    same = all(other is not None and _alike(node, other, names) for node, other in pairs)
    return names if same else None


def _batch(graph_def: graph_pb2.GraphDef) -> list[str]:
    """Return the names of the arguments that are no variables, in order."""
    arguments = sorted(
        (node for node in graph_def.node if node.op == "_Arg"), key=lambda node: node.attr["index"].i
    )
    return [node.name for node in arguments if node.attr["T"].type != types_pb2.DT_RESOURCE]


def _alike(node: node_def_pb2.NodeDef, other: node_def_pb2.NodeDef, names: Mapping[str, str]) -> bool:
    if node.op != other.op or node.device != other.device or len(node.input) != len(other.input):
        return False
    renamed = (tensor(names.get(name, name), port) for name, port in map(split_input, node.input))
    same_inputs = list(renamed) == list(other.input)
    return same_inputs and (node.op == "_Arg" or _attributes(node) == _attributes(other))


def _attributes(node: node_def_pb2.NodeDef) -> dict[str, bytes]:
    """Return the attributes that say what an op does, without notes of optimizers such as a wished device."""
    return {key: value.SerializeToString() for key, value in node.attr.items() if key[0] != "_"}


def _with_names(graph: TrainingGraph, names: Mapping[str, str]) -> TrainingGraph:
    def renamed(old: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[name] for name in old)

    def renamed_op(op: Op) -> Op:
        inputs = tuple((names[producer], port) for producer, port in op.inputs)
        return replace(op, name=names[op.name], inputs=inputs, control_inputs=renamed(op.control_inputs))

    layers = tuple(
        replace(
            layer,
            weight_grad_ops=renamed(layer.weight_grad_ops),
            update_ops=renamed(layer.update_ops),
            communication_ops=renamed(layer.communication_ops),
        )
        for layer in graph.layers
    )
    return TrainingGraph(
        ops={names[name]: renamed_op(op) for name, op in graph.ops.items()},
        layers=layers,
        variables=tuple(replace(v, handle=names.get(v.handle, v.handle)) for v in graph.variables),
        unclassified={names.get(name, name): why for name, why in graph.unclassified.items()},
        mixed={names.get(name, name): why for name, why in graph.mixed.items()},
    )
