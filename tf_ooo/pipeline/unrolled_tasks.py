"""The tasks of a whole step: what each op is for, in which micro-batch, with which layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grappler_passes.classify import classify_graph_def
from grappler_passes.dependencies import GraphIndex
from grappler_passes.graph import TrainingGraph
from grappler_passes.microbatches import is_sum, microbatch_graph
from grappler_passes.steps import STEP_ATTR, STEP_SCOPE, steps_of
from tf_ooo.errors import GraphError
from tf_ooo.pipeline.tasks import Assigned, assign

Where = tuple[str, int, int]


@dataclass(frozen=True)
class Step:
    """A graph of unrolled micro-batches, taken apart.

    Attributes:
        graph_def, index: the whole graph.
        steps: the micro-batch of each node, ``count`` for what comes once.
        count: micro-batches.
        graph: the classified last micro-batch with the updates; its layers are those of all.
        where: ``{op: (kind, layer, micro-batch)}``.
        glued: ranges of layers that no cut may part.
        sums: names of the sums of gradients.
    """

    graph_def: Any
    index: GraphIndex
    steps: Sequence[int | None]
    count: int
    graph: TrainingGraph
    where: Mapping[str, Where]
    glued: tuple[tuple[int, int], ...]
    sums: frozenset[str]

    def averaged(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Seconds of the classified micro-batch's ops: the mean over all micro-batches that were measured."""
        found = {}
        for name in self.graph.ops:
            others = [renamed(name, self.count - 1, number) for number in range(self.count)]
            measured = [seconds[other] for other in dict.fromkeys(others) if other in seconds]
            if measured:
                found[name] = sum(measured) / len(measured)
        return found


def is_unrolled(graph_def: Any) -> bool:
    """Whether a graph holds the micro-batches of a step."""
    return any(STEP_ATTR in node.attr for node in graph_def.node)


def take_apart(graph_def: Any) -> Step:
    """Classifies the micro-batches of a step.

    Raises GraphError where it is no training step, or micro-batches have different layers.
    """
    index = GraphIndex(graph_def)
    steps = steps_of(graph_def, index)
    count = max((step for step in steps if step is not None), default=0)
    if not count:
        raise GraphError("the graph holds no micro-batch and updates")
    graph, assigned = _classified(graph_def, index, steps, count - 1, count)
    where: dict[str, Where] = {}
    for number in range(count):
        _add(where, graph_def, index, steps, number, count, graph, assigned)
    _add_rest(where, index, steps, assigned, count)
    sums = frozenset(node.name for node in graph_def.node if is_sum(node))
    return Step(graph_def, index, steps, count, graph, where, assigned.glued, sums)


def _classified(graph_def, index, steps, number: int, count: int) -> tuple[TrainingGraph, Assigned]:
    alone = microbatch_graph(graph_def, index, steps, number, count)
    graph = classify_graph_def(alone)
    return graph, assign(graph, GraphIndex(alone))


def _add(where, graph_def, index, steps, number: int, count: int, graph, assigned: Assigned) -> None:
    """The ops of one micro-batch, by the names that they have in the classified one; else classified itself."""
    mine = [index.names[i] for i, step in enumerate(steps) if step == number]
    known = {name: assigned.where.get(renamed(name, number, count - 1)) for name in mine}
    have = {renamed(name, number, count - 1) in graph.ops for name in mine}
    if number != count - 1 and have == {True, False} and _differs(graph_def, mine, known, graph, number, count):
        other, own = _classified(graph_def, index, steps, number, count)
        if [sorted(x.variables) for x in other.layers] != [sorted(x.variables) for x in graph.layers]:
            raise GraphError(f"micro-batch {number} does not have the layers of the last one")
        known = {name: own.where.get(name) for name in mine}
    for name, at in known.items():
        if at is not None:
            where[name] = (*at, number)


def _differs(graph_def, mine, known, graph, number: int, count: int) -> bool:
    """Whether a micro-batch has computing ops that the classified one lacks (another number of rows)."""
    types = {node.name: node.op for node in graph_def.node}
    return any(
        renamed(name, number, count - 1) not in graph.ops and types[name] not in ("Const", "NoOp", "Identity")
        for name in mine
    )


def _add_rest(where, index, steps, assigned: Assigned, count: int) -> None:
    """Updates, and what graph optimizers have merged for several micro-batches."""
    number = {index.names[i]: step for i, step in enumerate(steps)}
    for name, (kind, layer) in assigned.where.items():
        if name not in where and name in number:
            step = number[name]
            where[name] = (kind, layer, 0 if step is None else min(step, count - 1))


def renamed(name: str, number: int, other: int) -> str:
    """The name that an op of one micro-batch has in another."""
    if number == other:
        return name
    return re.sub(rf"{STEP_SCOPE}{number}(?=/|$)", f"{STEP_SCOPE}{other}", name)
