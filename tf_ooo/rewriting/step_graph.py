"""Takes a traced step apart: what each op is for, in which micro-batch, with which layer.

What one trace tells holds for all traces of a step; :func:`check_known` tells whether a graph is one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE, is_sum, microbatch_graph, steps_of, turns_of
from grappler_passes.graph.dependencies import GraphIndex, has_side_effects, only_reads, states_of
from grappler_passes.graph.sizes import KnownShapes, with_list_sizes, with_sizes
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.graph.variables import VARIABLE_ATTR
from tf_ooo.costs.devices import device
from tf_ooo.costs.profile import op_seconds
from tf_ooo.errors import GraphError
from tf_ooo.rewriting.branches import Branches, branch_by_branch
from tf_ooo.rewriting.loops import forward_loops
from tf_ooo.rewriting.parts import LEAST_SHARE, WHOLE, divided
from tf_ooo.rewriting.tasks import assign, forward_and_loops

_STEP = re.compile(rf"{STEP_SCOPE}(\d+)(?=/|$)")
# TensorFlow adds these numbers when it lowers loops and branches; they differ between micro-batches.
_NUMBER = re.compile(r"/_(\d+)(?=/|$)")
_ONCE, _EACH = f"{STEP_SCOPE}once", f"{STEP_SCOPE}each"
_IN_NO_TASK = ("Const", "_Arg", "_Retval")
# If another trace is not classified itself, this share of its computing ops may have other names.
_OTHERS = 0.2
# In batches of another size, graph optimizers may leave out fewer ops of a task than this.
_FEW = 4
_COUNTED = ("Const", "NoOp", "Identity", "_Arg", "_Retval")
# Pairs of an op and the variable that it writes.
Writes = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Known:
    """Holds what one classified micro-batch tells, for all micro-batches in any batch.

    ``alone`` is its GraphDef, ``graph`` what it was classified to; ops elsewhere have their
    :func:`tf_ooo.rewriting.step_graph.general_names`.  ``inseparable``: ranges of layers that no cut may
    part; ``joined``: ops that add up gradients from several layers; ``writes``: ops that update weights, with
    the variable's name; ``alone_in_step``: whether it was the only micro-batch of its step.
    """

    graph: TrainingGraph
    alone: graph_pb2.GraphDef
    names: frozenset[str]
    where: Mapping[str, tuple[str, int]]
    sizes: Mapping[str, int]
    inseparable: tuple[tuple[int, int], ...] = ()
    joined: frozenset[str] = frozenset()
    writes: Writes = frozenset()
    alone_in_step: bool = False


def writes_of(step: StepGraph) -> Writes:
    """Return which ops update the trained variables of a step, and their slots."""
    index, named = step.index, step.variables
    trained = {name for variable in step.graph.variables for name in (variable.name, *variable.slots)}
    return frozenset(
        (step.general[index.names[i]], named[state])
        for i, op in enumerate(index.ops)
        if step.steps[i] == step.count and has_side_effects(op) and not only_reads(op)
        for state in states_of(index, i)
        if named.get(state) in trained
    )


def check_known(step: StepGraph) -> None:
    """Raise GraphError, naming an op, if the graph is not another trace of the known step.

    An op with another name would be in no task and in no order.  So each update has to be the planned one,
    and each task has to have most of its ops, unless one of both has only one micro-batch: then there is
    nothing to weigh and to add up.
    """
    known, general = step.known, step.general
    there = known.names | known.where.keys()
    computing = (n for n, op in zip(step.index.names, step.index.ops, strict=True) if op not in _COUNTED)
    names = [general[name] for name in computing]
    unplanned, present = [name for name in names if name not in there], frozenset(general.values())
    why = ""
    # A step with open rows also computes shapes, in addition to the planned ops.
    lacking = known.names - present
    if len(unplanned) > _OTHERS * len(names) and len(lacking) > _OTHERS * len(known.names):
        why = f"{len(unplanned)} of its {len(names)} ops are others, {unplanned[0]!r} first"
    why = why or _other_write(writes_of(step), known.writes)
    if not why and (step.count == 1) == known.alone_in_step:
        why = _lost_task(present, len(unplanned), known)
    if why:
        raise GraphError(
            f"it is not the step that was planned: {why} (train_step has to compute the same each time it is "
            "traced)"
        )


def _other_write(writes: Writes, planned: Writes) -> str:
    """Name the first variable that is updated by another op than planned, and say so."""
    differing = sorted(variable for _, variable in writes ^ planned)
    if not differing:
        return ""
    now, then = (
        " and ".join(repr(name) for name, variable in sorted(of) if variable == differing[0]) or "no op"
        for of in (writes, planned)
    )
    return f"{differing[0]} is updated by {now}, and was by {then}"


def _lost_task(names: frozenset[str], unplanned: int, known: Known) -> str:
    """Name the first task most of whose ops have other names, and say how many of its ops those are."""
    planned = Counter(known.where.values())
    lacking: dict[tuple[str, int], list[str]] = {}
    for name, at in known.where.items():
        if name not in names:
            lacking.setdefault(at, []).append(name)
    for (kind, layer), ops in lacking.items():
        count = planned[kind, layer]
        if _FEW <= len(ops) <= unplanned and len(ops) > count / 2:
            task = f"{kind} of {known.graph.layers[layer].name}"
            return f"{len(ops)} of the {count} ops of {task} are not there, {ops[0]!r} first"
    return ""


@dataclass(frozen=True)
class StepGraph:
    """Holds a graph of unrolled micro-batches, taken apart once; :meth:`after` gives the step after a pass.

    ``steps``: each node's micro-batch, ``count`` if it runs once; ``turns``; ``general``:
    :func:`general_names`.
    """

    graph_def: graph_pb2.GraphDef
    index: GraphIndex
    steps: Sequence[int | None]
    turns: Sequence[int]
    count: int
    known: Known
    general: Mapping[str, str]
    repeated: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @cached_property
    def where(self) -> dict[str, tuple[str, int, int]]:
        """Return (kind, layer, micro-batch) of ops; a later turn's micro-batches are numbered on.

        An op that runs again for the backward pass counts as dO.
        """
        where, known = {}, self.known.where
        for i, name in enumerate(self.index.names):
            at, step = known.get(self.general[name]), self.steps[i]
            if at is None or self.index.ops[i] in _IN_NO_TASK:
                continue
            number = self.turns[i] * self.count + (0 if step is None else min(step, self.count - 1))
            where[name] = "dO" if name in self.repeated else at[0], at[1], number
        return where

    @property
    def graph(self) -> TrainingGraph:
        """Return the classified micro-batch, with the layers of all micro-batches."""
        return self.known.graph

    @cached_property
    def classified(self) -> dict[str, tuple[str, int]]:
        """Return (kind, layer) of the ops in :attr:`graph` that belong to a task."""
        where = ((name, self.known.where.get(self.general[name])) for name in self.graph.ops)
        return {name: at for name, at in where if at is not None}

    @cached_property
    def sums(self) -> frozenset[str]:
        return frozenset(node.name for node in self.graph_def.node if is_sum(node))

    @cached_property
    def joined(self) -> frozenset[str]:
        return frozenset(name for name, key in self.general.items() if key in self.known.joined)

    @cached_property
    def sizes(self) -> dict[str, int]:
        sizes = self.known.sizes
        return {name: sizes[key] for name, key in self.general.items() if key in sizes}

    @cached_property
    def variables(self) -> dict[str, str]:
        """Return the names of variables by the arguments that stand for them."""
        nodes = (node for node in self.graph_def.node if VARIABLE_ATTR in node.attr)
        return {node.name: json.loads(node.attr[VARIABLE_ATTR].s)["name"] for node in nodes}

    @property
    def turns_with_updates(self) -> int:
        """Count the turns in which updates follow each other, each using the one before; usually one."""
        updates = (name for name, (kind, _, _) in self.where.items() if kind == "U")
        return 1 + max((self.turns[self.index.index[name]] for name in updates), default=0)

    def after(self, graph_def: graph_pb2.GraphDef, repeated: Mapping[str, str]) -> StepGraph:
        """Return the step after a pass that removed no op; ``repeated`` maps new ops to their originals."""
        index = GraphIndex(graph_def)
        originals = [repeated.get(name, name) for name in index.names]
        rows = [self.index.index[name] for name in originals]
        return dataclasses.replace(
            self,
            graph_def=graph_def,
            index=index,
            steps=[self.steps[row] for row in rows],
            turns=[self.turns[row] for row in rows],
            general={name: self.general[op] for name, op in zip(index.names, originals, strict=True)},
            repeated=repeated,
        )

    def averaged(
        self, seconds: Mapping[str, float], general: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """Return the seconds of the classified micro-batch's ops: the mean over all measured micro-batches.

        The first micro-batch has no sums, but the mean of a sum counts it too.  This holds for the step in
        which the micro-batch was classified, or for another trace, whose ops have these ``general`` names.
        """
        measured: dict[str, list[float]] = {}
        general = self.general if general is None else general
        for name, value in seconds.items():
            measured.setdefault(general.get(name, name), []).append(value)
        names = ((name, measured.get(self.general[name])) for name in self.graph.ops)
        without = {name: len(values) + (name in self.sums) for name, values in names if values}
        return {name: sum(measured[self.general[name]]) / count for name, count in without.items()}


def is_unrolled(graph_def: graph_pb2.GraphDef) -> bool:
    """Return whether a graph holds the micro-batches of a step."""
    return any(STEP_ATTR in node.attr for node in graph_def.node)


def general_names(names: Iterable[str], count: int) -> dict[str, str]:
    """Return for each op the name that it shares with other micro-batches and batches.

    Ops that differ only in TensorFlow's numbers are told apart by their order.
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


def take_apart(
    graph_def: graph_pb2.GraphDef, known: Known | None = None, share: float = LEAST_SHARE
) -> StepGraph:
    """Take a step apart; without ``known``, from another trace of it, the last micro-batch is classified.

    ``share`` is the least share of the forward pass that each part of a divided layer takes.  Raises
    GraphError if it is no training step, or not the known one.
    """
    index = GraphIndex(graph_def)
    steps = steps_of(graph_def, index)
    count = max((step for step in steps if step is not None), default=0)
    if not count:
        raise GraphError("the graph holds no micro-batch and updates")
    turns = turns_of(graph_def, index, steps, count)
    general = general_names(index.names, count)
    if known is not None:
        step = StepGraph(graph_def, index, steps, turns, count, known, general)
        check_known(step)
        return step
    alone = microbatch_graph(graph_def, index, steps, count - 1, count)
    # A later turn's reads count as if nothing had been updated: one backward pass tells all layers.
    turn_of = dict(zip(index.names, turns, strict=True))
    for node in alone.node if any(turns) else ():
        turn = turn_of.get(node.name, 0)
        node.input[:] = [text for text in node.input if text[0] != "^" or turn_of.get(text[1:], 0) >= turn]
    known = _classified(alone, general, share)
    step = StepGraph(graph_def, index, steps, turns, count, known, general)
    known = dataclasses.replace(known, writes=writes_of(step), alone_in_step=count == 1)
    return dataclasses.replace(step, known=known)


def _classified(alone: graph_pb2.GraphDef, general: Mapping[str, str], share: float) -> Known:
    """Classify ``alone``, the last micro-batch: ops that graph optimizers merged for several are in it."""
    graph, index, parts = classify_graph_def(alone), GraphIndex(alone), None
    if index.frame_names:
        graph = with_list_sizes(with_sizes(graph, alone, KnownShapes(), only_open=True), alone)
    branches = Branches(graph)
    if share != WHOLE:
        work = dataclasses.replace(device("cpu-core"), launch_s=0.0)  # only what an op does, not its call
        seconds = op_seconds(alone, work).seconds
        branches = branch_by_branch(graph, forward_loops(graph, index), seconds, share)
        forward, loops = forward_and_loops(branches.graph, index, branches.joins)
        own = {name: layer for name, layer in forward.items() if name not in branches.shared}
        graph, parts = divided(branches.graph, own, seconds, loops, share)
    assigned = assign(graph, index, parts, branches.found)
    return Known(
        graph,
        alone,
        frozenset(general[name] for name in graph.ops),
        {general[name]: at for name, at in assigned.where.items()},
        {general[name]: op.output_bytes for name, op in graph.ops.items() if op.output_bytes},
        assigned.inseparable,
        frozenset(general[name] for name in assigned.joined),
    )


def variable_layers(step: StepGraph) -> dict[str, int]:
    """Return the layer that each variable is used with; none for one that several layers' updates use.

    A slot has its weight's layer; a state or a metric has the highest of the forward ops that use it, or of
    the ops next to these.
    """
    layers: dict[str, int] = {}
    by_name = {variable.name: variable for variable in step.graph.variables}
    for layer in step.graph.layers:
        for name in layer.variables:
            layers[name] = layer.index
            layers.update(dict.fromkeys(by_name[name].slots, layer.index))
    arguments_of: dict[str, list[int]] = {}
    for argument, name in step.variables.items():
        arguments_of.setdefault(name, []).append(step.index.index[argument])
    for name, arguments in arguments_of.items():
        if name not in layers and (used_with := _used_with(step, arguments)) is not None:
            layers[name] = used_with
    return layers


def _used_with(step: StepGraph, arguments: Sequence[int]) -> int | None:
    index = step.index
    users = [s for i in arguments for s in index.succs[i]]
    read = [p for u in users for p, _ in index.data_preds[u]]
    for nodes in (users, [*users, *read, *(s for u in users for s in index.succs[u])]):
        places = [step.where[index.names[i]] for i in nodes if index.names[i] in step.where]
        if layers := [layer for kind, layer, _ in places if kind == "F"]:
            return max(layers)
    return None
