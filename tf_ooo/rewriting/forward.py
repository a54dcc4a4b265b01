"""Places a forward pass over several devices: each op goes where the weights are that it reads."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.graph.dependencies import ENTERS, EXITS, GraphIndex
from grappler_passes.graph.sizes import KnownShapes, output_bytes, outputs_with_sizes
from grappler_passes.passes.base import PassResult
from grappler_passes.passes.rewrite_plan import RewritePlan
from tf_ooo.errors import GraphError
from tf_ooo.hosts.devices import available_devices
from tf_ooo.rewriting import passes
from tf_ooo.rewriting.loops import members_of_loops
from tf_ooo.rewriting.placing import as_they_can, follow, is_resource, on_variables, slices_at_home
from tf_ooo.rewriting.request import RewriteRequest

if TYPE_CHECKING:
    from grappler_passes.graph.sizes import Shape

_LOG = logging.getLogger("tf_ooo")
# A scalar is sent to the op that it is computed with.
_SCALAR_BYTES = 8
# A loop's lists and results get this size, so that they stay where they are.
_STAYS = 1 << 62
_LISTS = "TensorList"

Sizes = Mapping[str, int]
_Nodes = Mapping[str, node_def_pb2.NodeDef]


def request_to_place_forward(
    seen: Callable[[], Sequence[tuple[int, Shape]]], dump_dir: passes.Folder = None
) -> RewriteRequest[PassResult]:
    """Ask that functions which evaluate or predict run on the devices of their variables.

    ``seen`` are dtypes and shapes of the batch that a function is traced for.  BackendError as
    RewriteRequest.
    """
    return RewriteRequest(
        "tf_ooo-forward",
        lambda graph_def: rewrite_forward(graph_def, KnownShapes(seen=tuple(seen())), dump_dir),
        lambda result, before: False,
        lambda request: "TensorFlow handed no graph of it over",
        failed="the forward pass could not be placed",
    )


def rewrite_forward(
    graph_def: graph_pb2.GraphDef, known: KnownShapes, dump_dir: passes.Folder = None
) -> PassResult:
    """Place all ops; raises GraphError if the graph cannot be read, PassError if a pass fails."""
    devices = place_forward(graph_def, _sizes(graph_def, known))
    plan = RewritePlan(devices=devices)
    return passes.placing_forward(plan, available_devices(), graph_def, dump_dir)(graph_def)


def place_forward(graph_def: graph_pb2.GraphDef, bytes_of: Sizes) -> dict[str, str]:
    """Return ``{op: device}`` of all ops but constants, arguments and results.

    Ops on a variable, and ops that read its value, run where it is, so that no weight is sent.  A while loop
    runs where the weights are that it uses.  Other ops follow the largest tensor that they read.
    """
    index, nodes = GraphIndex(graph_def), {node.name: node for node in graph_def.node}
    placed = on_variables(index, nodes)
    if not placed:
        raise GraphError("the function reads no variable")
    bound = frozenset(placed)
    named = zip(index.names, index.ops, strict=True)
    staying = [n for n, op in named if op.startswith(_LISTS) or op in EXITS and n not in bytes_of]
    bytes_of = {**bytes_of, **dict.fromkeys(staying, _STAYS)}
    slices_at_home(index, nodes, placed)
    weights = _with_weights(index, nodes, placed, bytes_of)
    loops = [_Loop(index, members, bound) for members in members_of_loops(index).values()]
    for loop in loops:
        loop.place_with(loop.weights(weights), placed, bytes_of)
    follow(index, nodes, placed, bytes_of)
    for loop in loops:
        if not loop.weights(weights):
            loop.place_with(loop.entering, placed, bytes_of)
    return as_they_can(nodes, placed)


def _sizes(graph_def: graph_pb2.GraphDef, known: KnownShapes) -> dict[str, int]:
    try:
        outputs = outputs_with_sizes(graph_def, known)
    except Exception as error:  # TensorFlow's shape functions raise whatever they like
        _LOG.debug("the shapes of the batch do not fit the graph: %s", error)
        outputs = outputs_with_sizes(graph_def, KnownShapes())
    sizes = {node.name: output_bytes(node.op, outputs.get(node.name, ())) for node in graph_def.node}
    return {name: size for name, size in sizes.items() if size is not None}


def _with_weights(
    index: GraphIndex, nodes: _Nodes, placed: dict[str, str], bytes_of: Sizes
) -> dict[int, str]:
    """Return the devices of ops that read a weight, or something computed from weights alone.

    If an op reads several weights, the largest decides.
    """
    weights: dict[int, str] = {}
    for i in index.order:
        name = index.names[i]
        if nodes[name].op in ("Const", "_Arg", "_Retval"):
            continue
        takes = [p for p, _ in index.data_preds[i]]
        read = [p for p in takes if p in weights and bytes_of.get(index.names[p], _STAYS) > _SCALAR_BYTES]
        if read and name not in placed:
            placed[name] = weights[max(read, key=lambda p: bytes_of.get(index.names[p], _STAYS))]
        of_weights = all(
            p in weights or index.ops[p] == "Const" or _is_handle(index, nodes, p) for p in takes
        )
        if name in placed and takes and of_weights and not _is_handle(index, nodes, i):
            weights[i] = placed[name]
    return weights


def _is_handle(index: GraphIndex, nodes: _Nodes, i: int) -> bool:
    return index.ops[i] == "VarHandleOp" or is_resource(nodes[index.names[i]])


class _Loop:
    """Holds a while loop, all of which stays on one device.

    ``bound`` are ops on variables, which stay with them.  ``entering`` is what the loop is given.
    """

    def __init__(self, index: GraphIndex, members: Sequence[int], bound: frozenset[str]) -> None:
        self._index, self._members, self._bound = index, members, bound
        inside = set(members)
        sources = [p for i in members if index.ops[i] in ENTERS for p, _ in index.data_preds[i]]
        self.entering = [p for p in sources if p not in inside]

    def weights(self, weights: Collection[int]) -> list[int]:
        """Return the weights that enter the loop, and the ops in it that read a variable."""
        bound = [i for i in self._members if self._index.names[i] in self._bound]
        return [*bound, *(i for i in self.entering if i in weights)]

    def place_with(self, tensors: Sequence[int], placed: dict[str, str], bytes_of: Sizes) -> None:
        """Place the loop, and the lists that it is given, where most bytes of these tensors are."""
        index, bytes_on = self._index, Counter[str]()
        for name in (index.names[i] for i in tensors):
            if name in placed:
                bytes_on[placed[name]] += 1 + bytes_of.get(name, 0)
        if not bytes_on:
            return
        device = max(bytes_on, key=lambda device: bytes_on[device])
        lists = [p for p in self.entering if index.ops[p].startswith(_LISTS)]
        for i in (*self._members, *lists):
            if index.names[i] not in self._bound and index.ops[i] != "Const":
                placed[index.names[i]] = device
