"""One update for the gradients of several batches (PipeDream-2BW, arXiv 2006.09503): the graph's side.

Every gradient that an optimizer is given is marked when the step is traced; here the sum over the batches of
a group takes its place.  ``two_versions.py`` says which batch is in which group, and keeps sums and weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, types_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation
from tf_ooo.compat import op_marks
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.accesses import accesses
from tf_ooo.modes.layerpipe.traced import Traced

_READ = "_ooo_read"
# They tell nothing of a weight's values.
_HARMLESS = ("VariableShape", "VarIsInitializedOp")


@dataclass(frozen=True)
class Sum:
    """The sum of one weight's gradients over a group of batches: the op that adds a batch's gradient.

    ``before``, ``share``: the placeholders for the sum so far, and for one over the number of batches, which
    makes the mean of the sum.
    """

    name: str
    before: str
    share: str


def with_sums(traced: Traced, weights: Mapping[str, int]) -> tuple[Traced, tuple[Sum, ...]]:
    """Return the step, its gradients marked, whose updates use means of gradients.

    Raises GraphError where a weight is updated from a gradient that no Keras optimizer was given.
    """
    _check_all_marked(traced, weights)
    marked = [node.name for node in traced.graph_def.node if op_marks.is_marked_gradient(node)]
    sums = {name: Sum(*(f"{name}/{part}" for part in ("sum", "before", "share"))) for name in marked}
    where = {total.name: traced.where[name] for name, total in sums.items() if name in traced.where}
    outputs: dict[str, Sequence[OutputInfo]] = {}
    for name, total in sums.items():
        infos = traced.outputs[name]
        outputs |= {total.name: infos, total.before: infos}
        outputs[total.share] = (dataclasses.replace(infos[0], shape=()),)
    return traced.rewritten(SumsPass(sums), where, outputs), tuple(sums.values())


@dataclass(frozen=True)
class SumsPass(Pass):
    """Makes of each marked gradient its share of a sum; ``sums``: by the gradient's name."""

    sums: Mapping[str, Sum]
    name: ClassVar[str] = "sums"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.OPS})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """The gradients keep their names."""
        summed = copy_of(graph_def)
        for node in [node for node in summed.node if node.name in self.sums]:
            total = self.sums[node.name]
            for name in (total.before, total.share):
                placeholder = summed.node.add(name=name, op="Placeholder")
                placeholder.attr["dtype"].CopyFrom(node.attr["T"])
            added = summed.node.add(name=total.name, op="AddV2", input=[node.input[0], total.before])
            added.attr["T"].CopyFrom(node.attr["T"])
            node.op, node.input[:] = "Mul", [total.name, total.share]
        return PassResult(summed, bool(self.sums), replaced=frozenset(self.sums))


def _check_all_marked(traced: Traced, weights: Mapping[str, int]) -> None:
    index = traced.index
    on_variables = {access.name: access for access in accesses(index)}
    below = [op_marks.is_marked_gradient(node) for node in traced.graph_def.node]
    written: dict[str, bool] = {}
    for i in index.order:
        access = on_variables.get(index.names[i])
        states = access.states if access is not None else frozenset[str]()
        # A value that comes from a state which was written before, such as Adam's momentum, is read again to
        # update the weight.
        below[i] = below[i] or any(below[p] for p, _ in index.data_preds[i])
        below[i] = below[i] or any(written.get(state, False) for state in states)
        if access is not None and access.writes:
            for state in states:  # weight decay is a write of its own
                written[state] = written.get(state, False) or below[i]
    for handle in weights:
        if not written.get(handle, True):
            raise GraphError(
                f"{handle!r} is not updated by a Keras optimizer: schedule='pipedream_2bw' adds up the "
                "gradients that optimizer.apply is given; take another schedule"
            )


def with_whole_reads(traced: Traced, weights: Mapping[str, int]) -> Traced:
    """Return the step in which lookups in a trained table read the table first: so it can be another version.

    Raises:
        GraphError: a weight is read by an op for which there is no such way.
    """
    shapes = {variable.handle: variable.shape for variable in traced.graph.variables}
    where: dict[str, tuple[str, int]] = {}
    outputs: dict[str, Sequence[OutputInfo]] = {}
    lookups: set[str] = set()
    for access in accesses(traced.index):
        name, handle = access.name, next(iter(access.states & weights.keys()), None)
        if access.writes or handle is None or access.op in ("ReadVariableOp", *_HARMLESS):
            continue
        if traced.where.get(name, ("U",))[0] == "U":
            continue
        if access.op != "ResourceGather":
            raise GraphError(
                f"{name!r} ({access.op}) reads {handle!r}, which schedule='pipedream_2bw' cannot give an "
                "earlier version of; take another schedule"
            )
        lookups.add(name)
        info = traced.outputs[name][0]
        where[f"{name}/{_READ}"] = traced.where[name]
        outputs[f"{name}/{_READ}"] = (dataclasses.replace(info, shape=shapes.get(handle)),)
        outputs[f"{name}/{_READ}_axis"] = (OutputInfo("int32", (), 4),)
    return traced.rewritten(WholeReadsPass(frozenset(lookups)), where, outputs)


@dataclass(frozen=True)
class WholeReadsPass(Pass):
    """Reads a variable as a whole, then looks rows up in its value: for each of the ``lookups``."""

    lookups: frozenset[str]
    name: ClassVar[str] = "whole_reads"
    relaxes = frozenset(
        {Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.OPS, Relaxation.SIDE_EFFECTS}
    )

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """The lookups keep their names."""
        whole = copy_of(graph_def)
        for node in [node for node in whole.node if node.name in self.lookups]:
            read, dims = f"{node.name}/{_READ}", node.attr["batch_dims"].i if "batch_dims" in node.attr else 0
            reader = whole.node.add(name=read, op="ReadVariableOp", input=[node.input[0]])
            reader.attr["dtype"].CopyFrom(node.attr["dtype"])
            axis = whole.node.add(name=f"{read}_axis", op="Const")
            axis.attr["dtype"].type = types_pb2.DT_INT32
            axis.attr["value"].tensor.CopyFrom(graph_protos.tensor_proto(dims))
            node.op, node.input[0] = "GatherV2", read
            node.input.insert(2, axis.name)
            node.attr["Tparams"].CopyFrom(node.attr["dtype"])
            node.attr["Taxis"].type = types_pb2.DT_INT32
            node.attr["batch_dims"].i = dims
            for name in ("dtype", "validate_indices"):
                node.attr.pop(name, None)
        return PassResult(whole, bool(self.lookups), replaced=self.lookups)
