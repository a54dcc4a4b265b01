"""Keeps what is known of a step from one trace, and checks that another graph is a trace of that step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import has_side_effects, only_reads, states_of
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.graph.variables import VARIABLE_ATTR
from tf_ooo.errors import GraphError

# The share of computing ops of a step that is not classified itself which may have other names.
_OTHERS = 0.2
# Graph optimizers may leave out fewer ops of a task than these in batches of another size.
_FEW = 4
_COUNTED = ("Const", "NoOp", "Identity", "_Arg", "_Retval")
# Pairs of an op and the variable that it writes.
Writes = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Known:
    """Holds what is known from one classified micro-batch and holds for all of them, in any batch.

    ``alone`` is its GraphDef, ``graph`` what it was classified to; ops elsewhere have their
    :func:`tf_ooo.rewriting.unrolled_tasks.general_names`.  ``inseparable``: ranges of layers that no cut may
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


def writes_of(
    graph_def: graph_pb2.GraphDef,
    index: GraphIndex,
    ops: Iterable[int],
    general: Mapping[str, str],
    graph: TrainingGraph,
) -> Writes:
    """Return which of the ``ops`` write the trained variables of a classified graph, and their slots."""
    trained = {name for variable in graph.variables for name in (variable.name, *variable.slots)}
    named = {
        node.name: json.loads(node.attr[VARIABLE_ATTR].s)["name"]
        for node in graph_def.node
        if VARIABLE_ATTR in node.attr
    }
    return frozenset(
        (general[index.names[i]], named[state])
        for i in ops
        if has_side_effects(index.ops[i]) and not only_reads(index.ops[i])
        for state in states_of(index, i)
        if named.get(state) in trained
    )


def check_known(
    index: GraphIndex, general: Mapping[str, str], writes: Writes, known: Known, microbatches: int
) -> None:
    """Raise GraphError, naming an op, where the graph is not another trace of the step that is known.

    An op with another name would be in no task and in no order.  So each update has to be the one that was
    planned, and each task has to have most of its ops, unless one of both has a single micro-batch: there is
    nothing to weigh and to add up then.  ``general``: the general name of each op; ``writes``: those of the
    graph's updates.
    """
    there = known.names | known.where.keys()
    names = [general[name] for name, op in zip(index.names, index.ops, strict=True) if op not in _COUNTED]
    others, present = [name for name in names if name not in there], frozenset(general.values())
    why = ""
    # A step whose rows are open computes shapes besides all that was planned.
    lacking = known.names - present
    if len(others) > _OTHERS * len(names) and len(lacking) > _OTHERS * len(known.names):
        why = f"{len(others)} of its {len(names)} ops are others, {others[0]!r} first"
    why = why or _other_write(writes, known.writes)
    if not why and (microbatches == 1) == known.alone_in_step:
        why = _lost_task(present, len(others), known)
    if why:
        raise GraphError(
            f"it is not the step that was planned: {why} (train_step has to compute the same each time it is "
            "traced)"
        )


def _other_write(writes: Writes, planned: Writes) -> str:
    """Return the first variable that is not updated by the op that was planned."""
    differing = sorted(variable for _, variable in writes ^ planned)
    if not differing:
        return ""
    now, then = (
        " and ".join(repr(name) for name, variable in sorted(of) if variable == differing[0]) or "no op"
        for of in (writes, planned)
    )
    return f"{differing[0]} is updated by {now}, and was by {then}"


def _lost_task(names: frozenset[str], others: int, known: Known) -> str:
    """Return the first task most of whose ops have other names, of which there are so many."""
    planned = Counter(known.where.values())
    lacking: dict[tuple[str, int], list[str]] = {}
    for name, at in known.where.items():
        if name not in names:
            lacking.setdefault(at, []).append(name)
    for (kind, layer), ops in lacking.items():
        count = planned[kind, layer]
        if _FEW <= len(ops) <= others and len(ops) > count / 2:
            task = f"{kind} of {known.graph.layers[layer].name}"
            return f"{len(ops)} of the {count} ops of {task} are not there, {ops[0]!r} first"
    return ""
