"""The tasks of a whole step: what each op is for, in which micro-batch, with which layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import (
    STEP_ATTR,
    STEP_SCOPE,
    is_sum,
    microbatch_graph,
    steps_of,
    turns_of,
)
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.list_sizes import with_list_sizes
from grappler_passes.graph.sizes import KnownShapes, with_sizes
from grappler_passes.passes.repeat import repeats
from tf_ooo.costs.devices import device
from tf_ooo.costs.op_seconds import op_seconds
from tf_ooo.errors import GraphError
from tf_ooo.rewriting.known import Known, check_known, writes_of
from tf_ooo.rewriting.parts import LEAST_SHARE, WHOLE, divided
from tf_ooo.rewriting.tasks import assign, forward_and_loops

Where = tuple[str, int, int]
_STEP = re.compile(rf"{STEP_SCOPE}(\d+)(?=/|$)")
# TensorFlow numbers these when it lowers loops and branches, for each micro-batch otherwise.
_NUMBER = re.compile(r"/_(\d+)(?=/|$)")
_ONCE, _EACH = f"{STEP_SCOPE}once", f"{STEP_SCOPE}each"


@dataclass(frozen=True)
class Step:
    """A graph of unrolled micro-batches, taken apart.

    ``steps``: the micro-batch of each node, ``count`` for what comes once; ``turns``: its turn.  ``where``:
    (kind, layer, micro-batch) of ops; those of a later turn have numbers behind all of the turn before.
    ``sums``: names of the sums of gradients.
    """

    graph_def: graph_pb2.GraphDef
    index: GraphIndex
    steps: Sequence[int | None]
    turns: Sequence[int]
    count: int
    known: Known
    where: Mapping[str, Where]
    sums: frozenset[str]

    @cached_property
    def general(self) -> dict[str, str]:
        return general_names(self.index.names, self.count)

    @cached_property
    def joined(self) -> frozenset[str]:
        return frozenset(name for name, key in self.general.items() if key in self.known.joined)

    @property
    def turns_with_updates(self) -> int:
        """Count updates that follow each other, each with what the one before has left; one as a rule."""
        updates = (name for name, (kind, _, _) in self.where.items() if kind == "U")
        return 1 + max((self.turns[self.index.index[name]] for name in updates), default=0)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = self.known.sizes
        return {name: sizes[key] for name, key in self.general.items() if key in sizes}

    def averaged(
        self, seconds: Mapping[str, float], general: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """Seconds of the classified micro-batch's ops: the mean over all micro-batches that were measured.

        The first micro-batch has no sums; the mean of theirs counts it all the same.  Holds for the step in
        which it was classified, or for another trace, whose ops have these ``general`` names.
        """
        measured: dict[str, list[float]] = {}
        general = self.general if general is None else general
        for name, value in seconds.items():
            measured.setdefault(general.get(name, name), []).append(value)
        names = ((name, measured.get(self.general[name])) for name in self.known.graph.ops)
        without = {name: len(values) + (name in self.sums) for name, values in names if values}
        return {name: sum(measured[self.general[name]]) / count for name, count in without.items()}


def is_unrolled(graph_def: graph_pb2.GraphDef) -> bool:
    """Return whether a graph holds the micro-batches of a step."""
    return any(STEP_ATTR in node.attr for node in graph_def.node)


def general_names(names: Iterable[str], count: int) -> dict[str, str]:
    """Return the name that each op has in common with those of the other micro-batches, and of other batches.

    Of ops that differ in TensorFlow's numbers only, the first has the lowest.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("/_", name), []).append(name)
    general_of = {}
    for bare, numbered in alike.items():
        general = _STEP.sub(lambda match: _ONCE if int(match[1]) == count else _EACH, bare)
        if len(numbered) > 1:
            numbered.sort(key=lambda name: [int(number) for number in _NUMBER.findall(name)])
        for place, name in enumerate(numbered):
            general_of[name] = f"{general}#{place}" if place else general
    return general_of


def take_apart(graph_def: graph_pb2.GraphDef, known: Known | None = None, share: float = LEAST_SHARE) -> Step:
    """The ops of a step; without ``known``, from another trace of it, the last micro-batch is classified.

    ``share``: of the forward pass, what each part of a layer that is divided takes at least.  Raises
    GraphError: it is no training step, or not the one that is known.
    """
    index = GraphIndex(graph_def)
    steps = steps_of(graph_def, index)
    count = max((step for step in steps if step is not None), default=0)
    if not count:
        raise GraphError("the graph holds no micro-batch and updates")
    turns = turns_of(graph_def, index, steps, count)
    general, repeated = general_names(index.names, count), repeats(graph_def)
    origins = {name: general[repeated.get(name, name)] for name in index.names}
    updates = [i for i, step in enumerate(steps) if step == count]
    if known is None:
        alone = microbatch_graph(graph_def, index, steps, count - 1, count)
        known = _classified(without_turns(alone, dict(zip(index.names, turns, strict=True))), general, share)
        writes = writes_of(graph_def, index, updates, origins, known.graph)
        known = dataclasses.replace(known, writes=writes, alone_in_step=count == 1)
    else:
        writes = writes_of(graph_def, index, updates, origins, known.graph)
        check_known(index, origins, writes, known, count)
    where: dict[str, Where] = {}
    for name, number, turn in zip(index.names, steps, turns, strict=True):
        at = known.where.get(origins[name])
        if at is not None and name in repeated:
            at = ("dO", at[1])
        if at is not None and index.ops[index.index[name]] not in ("Const", "_Arg", "_Retval"):
            where[name] = (*at, turn * count + (0 if number is None else min(number, count - 1)))
    sums = frozenset(node.name for node in graph_def.node if is_sum(node))
    return Step(graph_def, index, steps, turns, count, known, where, sums)


def _classified(alone: graph_pb2.GraphDef, general: Mapping[str, str], share: float) -> Known:
    """Ops that graph optimizers have merged for several micro-batches are in ``alone``, the last one."""
    graph, index, parts = classify_graph_def(alone), GraphIndex(alone), None
    if index.frame_names:
        graph = with_list_sizes(with_sizes(graph, alone, KnownShapes(), only_open=True), alone)
    if share != WHOLE:
        forward, loops = forward_and_loops(graph, index)
        work = dataclasses.replace(device("cpu-core"), launch_s=0.0)  # of what an op does, not of its call
        seconds = op_seconds(alone, work).seconds
        graph, parts = divided(graph, forward, seconds, loops, share)
    assigned = assign(graph, index, parts)
    return Known(
        graph,
        alone,
        frozenset(general[name] for name in graph.ops),
        {general[name]: at for name, at in assigned.where.items()},
        {general[name]: op.output_bytes for name, op in graph.ops.items() if op.output_bytes},
        assigned.inseparable,
        frozenset(general[name] for name in assigned.joined),
    )


def without_turns(graph_def: graph_pb2.GraphDef, turns: Mapping[str, int]) -> graph_pb2.GraphDef:
    """Reads of a later turn as if nothing had been updated before: all layers are known from one pass.

    The graph itself, changed: control edges from one turn to the next go.
    """
    for node in graph_def.node if any(turns.values()) else ():
        turn = turns.get(node.name, 0)
        kept = [text for text in node.input if text[0] != "^" or turns.get(text[1:], 0) >= turn]
        node.input[:] = kept
    return graph_def
