"""One update for the gradients of several batches (PipeDream-2BW, arXiv 2006.09503): the graph's side.

Every gradient that an optimizer is given is marked when the step is traced; here the sum over the batches of
a group takes its place.  ``two_versions.py`` says which batch is in which group, and keeps sums and weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import has_side_effects, only_reads, states_of
from tf_ooo.compat import op_marks
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe import node_edits
from tf_ooo.modes.layerpipe.traced import Traced

_READ = "_ooo_read"
# They tell nothing of a weight's values.
_HARMLESS = ("VariableShape", "VarIsInitializedOp")


@dataclass(frozen=True)
class Sum:
    """The sum of one weight's gradients over a group of batches.

    Attributes:
        name: the op that adds a batch's gradient to those before it.
        before: the placeholder for the sum of those.
        share: the placeholder for one over the number of batches, which makes the mean of the sum.
    """

    name: str
    before: str
    share: str


def with_sums(traced: Traced, weights: Mapping[str, int]) -> tuple[Traced, tuple[Sum, ...]]:
    """The step whose updates use means of gradients.

    Args:
        traced: the step, its gradients marked.
        weights: ``{handle: layer}`` of trained variables.

    Raises:
        GraphError: a weight is updated from a gradient that no Keras optimizer was given.
    """
    _check_all_marked(traced, weights)
    graph_def = type(traced.graph_def)()
    graph_def.CopyFrom(traced.graph_def)
    where = dict(traced.where)
    sums: list[Sum] = []
    outputs: dict[str, Any] = {node.name: traced.outputs[node.name] for node in traced.graph_def.node}
    for node in list(graph_def.node):
        if not op_marks.is_marked_gradient(node):
            continue
        one = Sum(*(f"{node.name}/{part}" for part in ("sum", "before", "share")))
        infos = outputs[node.name]
        outputs |= {one.name: infos, one.before: infos}
        outputs[one.share] = (dataclasses.replace(infos[0], shape=()),)
        if node.name in where:
            where[one.name] = where[node.name]
        node_edits.add_mean(graph_def, node, one.name, one.before, one.share)
        sums.append(one)
    made = dataclasses.replace(
        traced, graph_def=graph_def, index=GraphIndex(graph_def), where=where, outputs=outputs
    )
    return made, tuple(sums)


def _check_all_marked(traced: Traced, weights: Mapping[str, int]) -> None:
    index = traced.index
    below = [op_marks.is_marked_gradient(node) for node in traced.graph_def.node]
    written: dict[str, bool] = {}
    for i in index.order:
        states = states_of(index, i) if has_side_effects(index.ops[i]) else set()
        # What Adam's momentum holds is read again to update the weight.
        below[i] = below[i] or any(below[p] for p, _ in index.data_preds[i])
        below[i] = below[i] or any(written.get(state, False) for state in states)
        if not only_reads(index.ops[i]):
            for state in states:  # weight decay is a write of its own
                written[state] = written.get(state, False) or below[i]
    for handle in weights:
        if not written.get(handle, True):
            raise GraphError(
                f"{handle!r} is not updated by a Keras optimizer: schedule='pipedream_2bw' adds up the "
                "gradients that optimizer.apply is given; take another schedule"
            )


def with_whole_reads(traced: Traced, weights: Mapping[str, int]) -> Traced:
    """The step in which lookups in a trained table read the table first: so it can be another version.

    Raises:
        GraphError: a weight is read by an op for which there is no such way.
    """
    index = traced.index
    shapes = {variable.handle: variable.shape for variable in traced.graph.variables}
    graph_def = type(traced.graph_def)()
    graph_def.CopyFrom(traced.graph_def)
    nodes = {node.name: node for node in graph_def.node}
    where, outputs = dict(traced.where), {name: traced.outputs[name] for name in nodes}
    for i, op in enumerate(index.ops):
        name = index.names[i]
        if not only_reads(op) or op in ("ReadVariableOp", *_HARMLESS):
            continue
        handle = next(iter(states_of(index, i) & weights.keys()), None)
        if handle is None or where.get(name, ("U",))[0] == "U":
            continue
        if op != "ResourceGather":
            raise GraphError(
                f"{name!r} ({op}) reads {handle!r}, which schedule='pipedream_2bw' cannot give an earlier "
                "version of; take another schedule"
            )
        read, axis = f"{name}/{_READ}", f"{name}/{_READ}_axis"
        dtype = traced.outputs[name][0]
        node_edits.gather_from_read(graph_def, nodes[name], read, axis)
        where[read] = where[name]
        outputs[read] = (OutputInfo(dtype.dtype, shapes.get(handle), dtype.element_bytes),)
        outputs[axis] = (OutputInfo("int32", (), 4),)
    return dataclasses.replace(
        traced, graph_def=graph_def, index=GraphIndex(graph_def), where=where, outputs=outputs
    )
