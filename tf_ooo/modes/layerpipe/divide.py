"""A dO in two parts, on two consecutive processors (LayerPipe, arXiv 2108.06629, inter-layer).

The op that takes longest, a multiplication with the layer's weights, works on each row of the batch by
itself: the processor nearer to the loss gets the first rows, the other one the rest and all that comes after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grappler_passes.graph.dependencies import GraphIndex
from tf_ooo.modes.layerpipe import node_edits
from tf_ooo.modes.layerpipe.stages import HIGH, Stages
from tf_ooo.modes.layerpipe.traced import Traced

# Which input is the gradient, by op; its rows and those of the result are the batch's.
_GRADIENT = {
    "MatMul": 0,
    # Of transposed convolutions.
    "Conv2D": 0,
    "Conv3D": 0,
    "BatchMatMulV2": 0,
    "Conv2DBackpropInput": 2,
    "DepthwiseConv2dNativeBackpropInput": 2,
    "Conv3DBackpropInputV2": 2,
}
_SIZES = {"Conv2DBackpropInput": 0, "DepthwiseConv2dNativeBackpropInput": 0, "Conv3DBackpropInputV2": 0}


def lower_shares(traced: Traced, op_seconds: Mapping[str, float]) -> dict[int, tuple[float, float]]:
    """The least and the most of each layer's dO that the processor nearer to the input can have.

    Only the heaviest op is divided; what comes before it is the other processor's, the rest this one's.
    """
    found: dict[int, tuple[float, float]] = {}
    able = _able(traced)
    for layer in range(len(traced.graph.layers)):
        name = _heaviest(traced, able.get(layer, ()), op_seconds)
        if name is None:
            found[layer] = (1.0, 1.0)
        elif op_seconds.get(name, 0.0) > 0:
            before_s, own_s, all_s = _seconds(traced, name, layer, op_seconds)
            found[layer] = (1 - (before_s + own_s) / all_s, 1 - before_s / all_s)
    return found


def divided(
    traced: Traced, stages: Stages, op_seconds: Mapping[str, float]
) -> tuple[Traced, Stages, tuple[str, ...]]:
    """The step with each dO that the stages divide in two parts.

    Returns:
        The step; the stages, with the dO that are divided; what could not be, and runs on the processor
        nearer to the input.
    """
    notes: list[str] = []
    shares, of = dict(stages.shares), dict(stages.of)
    for layer, (share, _) in stages.shares.items():
        name = _heaviest(traced, _able(traced).get(layer, ()), op_seconds)
        if name is None:
            notes.append(
                f"dO of layer {traced.graph.layers[layer].name} has no op that can be divided by rows"
            )
            del shares[layer], of[HIGH, layer]
            continue
        traced = _divide(traced, name, layer, _share_of_rows(traced, name, layer, share, op_seconds))
    return traced, dataclasses.replace(stages, of=of, shares=shares), tuple(notes)


def _share_of_rows(
    traced: Traced, name: str, layer: int, share: float, op_seconds: Mapping[str, float]
) -> float:
    """The share of an op's rows that, with all that comes before it, takes ``share`` of the dO's seconds."""
    if op_seconds.get(name, 0.0) <= 0:
        return share
    before_s, own_s, all_s = _seconds(traced, name, layer, op_seconds)
    return min(max((share * all_s - before_s) / own_s, 0.0), 1.0)


def _seconds(
    traced: Traced, name: str, layer: int, op_seconds: Mapping[str, float]
) -> tuple[float, float, float]:
    """Of what comes before an op of a layer's dO, of itself, and of all of the dO."""
    members = {one for one, at in traced.where.items() if at == ("dO", layer)}
    before = (_before(traced.index, traced.where, name, layer) & members) - {name}
    before_s, all_s = (sum(op_seconds.get(one, 0.0) for one in some) for some in (before, members))
    return before_s, op_seconds[name], all_s


def _able(traced: Traced) -> dict[int, list[Any]]:
    """The ops of each layer's dO that can be divided."""
    found: dict[int, list[Any]] = {}
    for node in traced.graph_def.node:
        kind, layer = traced.where.get(node.name, ("", 0))
        if kind == "dO" and _by_rows(traced, node):
            found.setdefault(layer, []).append(node)
    return found


def _heaviest(traced: Traced, able: Sequence[Any], op_seconds: Mapping[str, float]) -> str | None:
    if not able:
        return None
    return str(max(able, key=lambda node: (op_seconds.get(node.name, 0.0), _size(traced, node.name))).name)


def _by_rows(traced: Traced, node: Any) -> bool:
    # Reading a map of protobuf adds what is not there.
    if node.op not in _GRADIENT or any(
        key in node.attr and node.attr[key].b for key in ("transpose_a", "adj_x")
    ):
        return False
    index = traced.index
    inputs = index.data_preds[index.index[node.name]]
    producer, _ = inputs[_GRADIENT[node.op]]
    if traced.where.get(index.names[producer], ("",))[0] != "dO":
        return False
    # A weight has a size; an activation (attention multiplies with one) has the batch's rows.
    special = (_GRADIENT[node.op], _SIZES.get(node.op))
    others = [one for place, one in enumerate(inputs) if place not in special]
    shapes = [traced.outputs[index.names[p]][port].shape or (None,) for p, port in others]
    # One with a matrix for each head or expert: then the gradient's first axis is that of heads, not of rows.
    heads = node.op.startswith("BatchMatMul") and any(len(shape) > 2 for shape in shapes)
    return not heads and all(None not in shape for shape in shapes)


def _size(traced: Traced, name: str) -> int:
    shape = traced.outputs[name][0].shape or ()
    return math.prod(size for size in shape if size is not None)


def _divide(traced: Traced, name: str, layer: int, share: float) -> Traced:
    index = traced.index
    node = next(node for node in traced.graph_def.node if node.name == name)
    infos = [traced.outputs[index.names[p]][port] for p, port in index.data_preds[index.index[name]]]
    parts = node_edits.in_two_parts(node, infos, _GRADIENT[node.op], _SIZES.get(node.op), share)
    graph_def = type(traced.graph_def)()
    graph_def.CopyFrom(traced.graph_def)
    kept = [one for one in graph_def.node if one.name != name]
    del graph_def.node[:]
    graph_def.node.extend([*kept, *parts.nodes])
    made = GraphIndex(graph_def)
    where = dict(traced.where)
    where.update((one.name, ("dO", layer)) for one in parts.nodes)
    where.update(dict.fromkeys(_before(made, where, parts.high, layer), (HIGH, layer)))
    outputs = {one.name: traced.outputs[one.name] for one in kept}
    return dataclasses.replace(
        traced, graph_def=graph_def, index=made, where=where, outputs={**outputs, **parts.outputs}
    )


def with_shared_grads(traced: Traced, stages: Stages) -> tuple[Traced, Stages]:
    """dO ops that a layer's own dW needs, where dW is on a processor nearer to the loss, run there too.

    Such as the gradient of an activation behind the layer, or one op that computes dO and dW together.
    Where dW is nearer to the loss than both parts of a dO, such ops are part of it; the parts stay where they
    are.
    """
    where, of, index = dict(traced.where), dict(stages.of), traced.index
    for layer in range(len(traced.graph.layers)):
        if of["dW", layer] <= of["dO", layer]:
            continue
        users = [name for name, at in where.items() if at in (("dW", layer), ("U", layer))]
        needed = set().union(*(_before(index, where, name, layer) for name in users))
        needed = {name for name in needed if where[name] in (("dO", layer), (HIGH, layer))}
        high = {name for name, at in where.items() if at == (HIGH, layer)}
        if high and of["dW", layer] > of[HIGH, layer]:
            where.update(dict.fromkeys(needed, ("dW", layer)))
            continue
        needed |= high
        if needed:
            of[HIGH, layer] = max(of["dW", layer], of.get((HIGH, layer), 0))
            where.update(dict.fromkeys(needed, (HIGH, layer)))
    return dataclasses.replace(traced, where=where), dataclasses.replace(stages, of=of)


def _before(index: GraphIndex, where: Mapping[str, Any], name: str, layer: int) -> set[str]:
    """The layer's backward ops that an op needs, and itself."""
    own = {(kind, layer) for kind in ("dO", HIGH, "dW", "U")}
    found, stack = {name}, [index.index[name]]
    while stack:
        for producer, _ in index.data_preds[stack.pop()]:
            known = index.names[producer]
            if known not in found and where.get(known) in own:
                found.add(known)
                stack.append(producer)
    return found
