"""Spreads a model's step over rounds: all that lies between the plan and the functions that run."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos, shape_inference
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import GraphIndex, reached
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, Relaxation
from tf_ooo.modes.layerpipe.delays import Delays, LaterWeights, delays_of, frozen_weights
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.layerpipe.rounds import HIGH, Retiming, Rounds, Stages
from tf_ooo.modes.layerpipe.ticks import Ticks
from tf_ooo.modes.layerpipe.traced import Traced, Where, accesses, trace
from tf_ooo.modes.layerpipe.versions import LaterWeight, with_later_weights

if TYPE_CHECKING:
    import keras


# Divides a dO between two consecutive processors (LayerPipe, arXiv 2108.06629, inter-layer). Its longest op,
# a multiplication with the layer's weights, works on each row of the batch by itself: the processor nearer to
# the loss gets the first rows, the other one the rest and all ops after it.

# This input is the gradient, by op; its rows and those of the result are the batch's.
_GRADIENT = {
    "MatMul": 0,
    # Transposed convolutions have this in their dO.
    "Conv2D": 0,
    "Conv3D": 0,
    "BatchMatMulV2": 0,
    "Conv2DBackpropInput": 2,
    "DepthwiseConv2dNativeBackpropInput": 2,
    "Conv3DBackpropInputV2": 2,
}
# And this one holds the shape of the result.
_SIZES = {"Conv2DBackpropInput": 0, "DepthwiseConv2dNativeBackpropInput": 0, "Conv3DBackpropInputV2": 0}


def lower_shares(traced: Traced, op_seconds: Mapping[str, float]) -> dict[int, tuple[float, float]]:
    """Return the least and the most share of each layer's dO that the processor nearer to the input can run.

    It runs all ops behind the heaviest one, and its part of that one.
    """
    bounds: dict[int, tuple[float, float]] = {}
    for layer in range(len(traced.graph.layers)):
        name = _heaviest(traced, layer, op_seconds)
        if name is None:
            bounds[layer] = (1.0, 1.0)
        elif op_seconds.get(name, 0.0) > 0:
            before_s, own_s, all_s = _seconds(traced, name, layer, op_seconds)
            bounds[layer] = (1 - (before_s + own_s) / all_s, 1 - before_s / all_s)
    return bounds


def divided(
    traced: Traced, stages: Stages, op_seconds: Mapping[str, float]
) -> tuple[Traced, Stages, tuple[str, ...]]:
    """Return step and stages with dO in two parts, and the dO that cannot be: these stay near the input."""
    notes: list[str] = []
    shares, of = dict(stages.shares), dict(stages.of)
    for layer, (share, _) in stages.shares.items():
        name = _heaviest(traced, layer, op_seconds)
        if name is None:
            notes.append(
                f"the output gradient of {traced.graph.layers[layer].name} stays on one device: none of its "
                "ops can be divided by rows"
            )
            del shares[layer], of[HIGH, layer]
        else:
            traced = _divide(traced, name, layer, _share_of_rows(traced, name, layer, share, op_seconds))
    return traced, dataclasses.replace(stages, of=of, shares=shares), tuple(notes)


def _share_of_rows(
    traced: Traced, name: str, layer: int, share: float, op_seconds: Mapping[str, float]
) -> float:
    """Return the share of an op's rows that, with all ops before it, takes ``share`` of the dO's seconds."""
    if op_seconds.get(name, 0.0) <= 0:
        return share
    before_s, own_s, all_s = _seconds(traced, name, layer, op_seconds)
    return min(max((share * all_s - before_s) / own_s, 0.0), 1.0)


def _seconds(
    traced: Traced, name: str, layer: int, op_seconds: Mapping[str, float]
) -> tuple[float, float, float]:
    """Return the seconds within a layer's dO of all before an op, of the op, and of the whole dO."""
    members = {op for op, at in traced.where.items() if at == ("dO", layer)}
    before = (_before(traced.index, traced.where, [name], layer) & members) - {name}
    before_s, all_s = (sum(op_seconds.get(op, 0.0) for op in ops) for ops in (before, members))
    return before_s, op_seconds[name], all_s


def _heaviest(traced: Traced, layer: int, op_seconds: Mapping[str, float]) -> str | None:
    """Return the op of a layer's dO that is worth dividing, if any can be divided."""
    own = (node for node in traced.graph_def.node if traced.where.get(node.name) == ("dO", layer))
    able = [node.name for node in own if _by_rows(traced, node)]

    def seconds_and_size(name: str) -> tuple[float, int]:
        shape = traced.outputs[name][0].shape or ()
        return op_seconds.get(name, 0.0), math.prod(size for size in shape if size is not None)

    return max(able, key=seconds_and_size, default=None)


def _by_rows(traced: Traced, node: node_def_pb2.NodeDef) -> bool:
    # Reading a map of protobuf adds what is not there.
    transposed = (key in node.attr and node.attr[key].b for key in ("transpose_a", "adj_x"))
    if node.op not in _GRADIENT or any(transposed):
        return False
    index = traced.index
    inputs = index.data_preds[index.index[node.name]]
    producer, _ = inputs[_GRADIENT[node.op]]
    if traced.where.get(index.names[producer], ("",))[0] != "dO":
        return False
    # A weight has a size; an activation (attention multiplies with one) has the batch's rows.
    special = (_GRADIENT[node.op], _SIZES.get(node.op))
    operands = [tensor for place, tensor in enumerate(inputs) if place not in special]
    shapes = [traced.outputs[index.names[p]][port].shape or (None,) for p, port in operands]
    # One with a matrix for each head or expert: then the gradient's first axis is that of heads, not of rows.
    heads = node.op.startswith("BatchMatMul") and any(len(shape) > 2 for shape in shapes)
    return not heads and all(None not in shape for shape in shapes)


def _divide(traced: Traced, name: str, layer: int, share: float) -> Traced:
    index = traced.index
    node = next(node for node in traced.graph_def.node if node.name == name)
    infos = [traced.outputs[index.names[p]][port] for p, port in index.data_preds[index.index[name]]]
    parts, first, outputs = in_two_parts(node, infos, share)
    own = dict.fromkeys(outputs, ("dO", layer))
    in_parts = traced.rewritten(DividePass(name, parts), own, outputs)
    high = _before(in_parts.index, in_parts.where, [first], layer)
    return dataclasses.replace(in_parts, where={**in_parts.where, **dict.fromkeys(high, (HIGH, layer))})


def in_two_parts(
    node: node_def_pb2.NodeDef, infos: Sequence[OutputInfo], share: float
) -> tuple[tuple[node_def_pb2.NodeDef, ...], str, dict[str, list[OutputInfo]]]:
    """Return the nodes that compute an op on the first ``share`` of the rows and on the rest, and join them.

    Each part has at least one row; a single row goes to the rest.  Also returns the first part's name and the
    outputs of all nodes; the last node has the op's name.
    """
    gradient, sizes = _GRADIENT[node.op], _SIZES.get(node.op)
    attributes = {key: value for key, value in node.attr.items() if key not in ("_class", "_output_shapes")}
    graph = tf.Graph()
    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(tf.as_dtype(i.dtype), i.shape, f"input_{n}") for n, i in enumerate(infos)
        ]
        with tf.name_scope(f"{node.name}_parts"):
            rows = tf.shape(inputs[gradient])[0]
            first = tf.cast(tf.round(tf.cast(rows, tf.float32) * share), tf.int32)
            first = tf.minimum(tf.maximum(first, 1), rows - 1)
            counts = [first, rows - first]
            pieces = tf.split(inputs[gradient], tf.stack(counts), num=2)
            results = []
            for number, piece in enumerate(pieces):
                read, name = list(inputs), f"part_{number}"
                read[gradient] = piece
                if sizes is not None:
                    read[sizes] = tf.concat([[counts[number]], inputs[sizes][1:]], 0)
                part = graph.create_op(node.op, read, attrs=attributes, name=name, compute_device=False)
                results.append(part.outputs[0])
        joined = tf.concat(results, 0, name=node.name)
    names = {f"input_{n}": text for n, text in enumerate(t for t in node.input if t[0] != "^")}
    nodes = [part for part in graph.as_graph_def().node if part.name not in names]
    for part in nodes:
        part.input[:] = [names.get(text.partition(":")[0], text) for text in part.input]
    operations = {op.name: op for op in graph.get_operations() if op.name not in names}
    outputs = {name: list(map(shape_inference.info_of, op.outputs)) for name, op in operations.items()}
    assert joined.op.name == node.name, "the name of the divided op is taken"
    return tuple(nodes), str(results[0].op.name), outputs


@dataclasses.dataclass(frozen=True)
class DividePass(Pass):
    """Replaces the op ``divided`` by ``parts``, whose result has its name."""

    divided: str
    parts: tuple[node_def_pb2.NodeDef, ...]
    name: ClassVar[str] = "divide"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.OPS})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        kept = [node for node in graph_def.node if node.name != self.divided]
        in_parts = graph_protos.with_nodes(graph_def, [*kept, *self.parts])
        return PassResult(in_parts, True, replaced=frozenset({self.divided}))


def with_shared_grads(traced: Traced, stages: Stages) -> tuple[Traced, Stages]:
    """Move dO ops that a layer's own dW needs to dW's processor, if that is nearer to the loss.

    Examples are the gradient of an activation behind the layer, or one op that computes dO and dW together.
    If dW is nearer to the loss than both parts of a dO, such ops join dW; the parts stay where they are.
    """
    where, of, index = dict(traced.where), dict(stages.of), traced.index
    for layer in range(len(traced.graph.layers)):
        if of["dW", layer] <= of["dO", layer]:
            continue
        users = [name for name, at in where.items() if at in (("dW", layer), ("U", layer))]
        before = _before(index, where, users, layer)
        needed = {name for name in before if where[name] in (("dO", layer), (HIGH, layer))}
        high = {name for name, at in where.items() if at == (HIGH, layer)}
        if high and of["dW", layer] > of[HIGH, layer]:
            where.update(dict.fromkeys(needed, ("dW", layer)))
            continue
        needed |= high
        if needed:
            of[HIGH, layer] = max(of["dW", layer], of.get((HIGH, layer), 0))
            where.update(dict.fromkeys(needed, (HIGH, layer)))
    return dataclasses.replace(traced, where=where), dataclasses.replace(stages, of=of)


def _before(index: GraphIndex, where: Where, names: Iterable[str], layer: int) -> set[str]:
    """Return the layer's backward ops that these ops need, and themselves."""
    own = {(kind, layer) for kind in ("dO", HIGH, "dW", "U")}

    def inputs(op: str) -> list[str]:
        producers = (index.names[producer] for producer, _ in index.data_preds[index.index[op]])
        return [producer for producer in producers if where.get(producer) in own]

    return reached(names, inputs)


@dataclass(frozen=True)
class SpreadPlan:
    """Says where each part of a model runs; kept for all fits of one model.

    Attributes:
        stages: where the tasks of its layers run.
        devices: full names of the processors.
        layers: the variables of each layer, in the numbering of the stages.
        op_seconds: measured seconds of the step's ops, which tell the op of a dO that is worth dividing.
        home: the processor of each variable, by its name in graphs: dW's for weights and slots, F's for
            states.
        step_s: seconds of the last hundred rounds in which nothing was traced.
    """

    stages: Stages
    devices: Sequence[str]
    layers: Sequence[Collection[str]] | None = None
    op_seconds: Mapping[str, float] = field(default_factory=dict)
    home: Mapping[str, int] = field(default_factory=dict)
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))


@dataclass(frozen=True)
class Spread:
    """Holds a step over rounds; ``stages``: the final ones, ``notes``: where they differ from the plan."""

    traced: Traced
    rounds: Rounds
    delays: Delays
    ticks: Ticks
    stages: Stages
    notes: tuple[str, ...] = ()


def spread(
    model: keras.Model, batch: object, plan: SpreadPlan, options: LayerPipe, data_spec: object = None
) -> Spread:
    """Trace a model's step and spread it; its variables are on their devices.

    Raises:
        GraphError: the step cannot be spread; the message names the op.
        PassError: a pass has changed more than it declares.
    """
    traced = trace(model, batch, plan.layers, data_spec, options.dump_dir)
    trained = _trained(traced)
    again = _read_again(traced, trained)
    traced, stages, notes = divided(traced, plan.stages, plan.op_seconds)
    traced, stages = with_shared_grads(traced, stages)
    placeholders: tuple[LaterWeight, ...] = ()
    if options.weights != "stash":
        traced, placeholders = with_later_weights(traced, trained, stages)
    rounds = Retiming(
        traced,
        stages,
        plan.devices,
        weights=trained,
        given={*traced.arguments, *(weight.name for weight in placeholders)},
        unchanged=frozen_weights(model, traced) - trained.keys(),
        wanted={weight.name: weight.round for weight in placeholders},
    ).rounds()
    delays = delays_of(traced, rounds)
    weights = LaterWeights(traced, rounds, placeholders, options.weights == "ema")
    return Spread(traced, rounds, delays, Ticks(traced, rounds, delays, weights), stages, (*notes, *again))


def _trained(traced: Traced) -> dict[str, int]:
    """Return the layer of each weight, by its handle."""
    handles = {variable.name: variable.handle for variable in traced.graph.variables}
    return {handles[name]: layer.index for layer in traced.graph.layers for name in layer.variables}


def _read_again(traced: Traced, trained: Collection[str]) -> list[str]:
    """Name backward passes that read their weights again (recomputation): they have changed by then."""
    places = (
        traced.where.get(access.name, ("", 0))
        for access in accesses(traced.index)
        if access.op == "ReadVariableOp" and not access.states.isdisjoint(trained)
    )
    return [
        f"the backward pass of {traced.graph.layers[layer].name} reads its weights again (recomputation): it "
        "sees later ones than its forward pass, also with weights='stash'"
        for layer in sorted({layer for kind, layer in places if kind in ("dO", "dW")})
    ]
