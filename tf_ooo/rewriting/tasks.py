"""Finds what each op of a micro-batch is for, and with which layer it runs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import (
    LayerTask,
    OpKind,
    TrainingGraph,
    forward_layers,
    layers_of_weights_and_readers,
)
from tf_ooo.rewriting.loops import (
    LoopTask,
    fed_to_loops,
    forward_loops,
    layers_using,
    loop_tasks,
    ops_of_data,
)

_KINDS = {OpKind.FORWARD: "F", OpKind.OUTPUT_GRAD: "dO", OpKind.WEIGHT_GRAD: "dW", OpKind.UPDATE: "U"}

Where = Mapping[str, tuple[str, int]]
LayerRanges = tuple[tuple[int, int], ...]


def forward_and_loops(
    graph: TrainingGraph, index: GraphIndex, joins: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, int], list[LoopTask]]:
    """Return the layer of each forward op, and the loops.

    A forward op belongs to the highest layer whose weights its result depends on; all ops of a loop belong to
    one layer. ``joins`` begin a layer without weights.
    """
    together = forward_loops(graph, index)
    known = layers_of_weights_and_readers(graph, together, joins)
    loops = loop_tasks(graph, index, known)
    of_loops = {name: loop.layer for loop in loops for name in loop.members}
    forward = forward_layers(graph, together, joins) | fed_to_loops(graph, index, known, loops)
    return forward | {name: layer for name, layer in of_loops.items() if name in forward}, loops


@dataclass(frozen=True)
class Assigned:
    """Holds what :func:`assign` finds.

    ``inseparable`` are ranges of layers that run in one loop, so that no cut may separate them.  ``joined``
    are dW ops that read gradients from other layers (a tied weight's): they wait for stages above, which no
    schedule expects, and run when they can.
    """

    where: Where
    inseparable: LayerRanges
    joined: frozenset[str]


def assign(
    graph: TrainingGraph, index: GraphIndex, parts: Mapping[str, int] | None = None, branched: bool = False
) -> Assigned:
    """Return kind and layer of each op; ops that serve several layers' updates are left out.

    A dO op belongs to the layer whose forward op it is the gradient of (:func:`_output_grad_layers`).
    ``parts`` are the layers of forward ops if layers were divided; ``branched`` says that some layers are
    parallel, so that gradients do not go down through all.
    """
    if parts is None:
        forward, loops = forward_and_loops(graph, index)
    else:
        forward, loops = dict(parts), loop_tasks(graph, index, parts)
    of_loops = {name: loop.layer for loop in loops for name in loop.members}
    where = {name: ("F", layer) for name, layer in forward.items()}
    for name, op in graph.ops.items():
        if op.kind in (OpKind.WEIGHT_GRAD, OpKind.UPDATE) and op.layer is not None:
            where[name] = (_KINDS[op.kind], op.layer)
    touching = _touching(graph, forward)
    below = _upstream(graph, forward) if branched else [(1 << layer.index) - 1 for layer in graph.layers]
    output_grads = _output_grad_layers(graph, touching, of_loops, below)
    where.update((name, ("dO", layer)) for name, layer in output_grads.items())
    away = _weight_grads_away(graph, touching, output_grads, of_loops)
    handed_on = _handed_on(graph, forward, touching, away)
    where.update((name, ("dO" if name in handed_on else "dW", at)) for name, at in away.items())
    for loop in loops:
        where.update(dict.fromkeys(loop.members, (loop.kind, loop.layer)))
    where = {name: at for name, at in where.items() if graph.ops[name].type != "Const"}
    inseparable = tuple(sorted({loop.inseparable for loop in loops}))
    return Assigned(where, inseparable, _joined(graph, where))


def _joined(graph: TrainingGraph, where: Where) -> frozenset[str]:
    """Return the dW ops that depend on another layer's dW."""
    joined: set[str] = set()
    for name, op in graph.ops.items():
        at = where.get(name)
        if at is None or at[0] != "dW":
            continue
        dw = (where[producer] for producer in op.producers if where.get(producer, ("", 0))[0] == "dW")
        if any(producer in joined for producer in op.producers) or any(place != at for place in dw):
            joined.add(name)
    return frozenset(joined)


def _touching(graph: TrainingGraph, forward: Mapping[str, int]) -> dict[str, set[int]]:
    """Return for each forward tensor the layers that make or read it.

    Constants that several layers read belong to no layer: graph optimizers merge all equal ones.
    """
    touching = {name: {layer} for name, layer in forward.items()}
    for name, layer in forward.items():
        for producer in graph.ops[name].producers:
            if producer in touching:
                touching[producer].add(layer)
    return {
        name: layers
        for name, layers in touching.items()
        if graph.ops[name].type != "Const" or len(layers) == 1
    }


def _upstream(graph: TrainingGraph, forward: Mapping[str, int]) -> list[int]:
    """Return for each layer, as bits, the layers whose results it depends on."""
    upstream = [0] * len(graph.layers)
    for name, layer in sorted(forward.items(), key=operator.itemgetter(1)):
        for below in {forward[p] for p in graph.ops[name].producers if forward.get(p, layer) < layer}:
            upstream[layer] |= upstream[below] | 1 << below
    return upstream


def _output_grad_layers(
    graph: TrainingGraph, touching: Mapping[str, set[int]], of_loops: Mapping[str, int], below: Sequence[int]
) -> dict[str, int]:
    """Return each dO op's layer; ``below``: for each layer, as bits, those its gradients go down to.

    The forward tensors that it reads, each made by one layer and read by others, say whose gradient it is.
    Backward goes down, so it is the highest of these layers that is not above the layers of the dO that the
    op reads. If those are parallel, it is below both: the sum of two branches' gradients belongs to the layer
    that both read. Constants tell it only for ops that read no gradient: one that a lower layer reads may
    stand for any other layer's.
    """
    layer_of: dict[str, int] = {}
    gradients: set[str] = set()
    last = len(graph.layers) - 1
    for name, op in graph.ops.items():
        if op.kind is not OpKind.OUTPUT_GRAD:
            continue
        if name in of_loops:
            layer_of[name] = of_loops[name]
            continue
        above = {layer_of[p] for p in op.producers if p in layer_of}
        lowest = min(above, default=last)
        common = (below[layer] | 1 << layer for layer in above)
        below_all = functools.reduce(operator.and_, common, (2 << lowest) - 1) or (2 << lowest) - 1
        computed = [p for p in op.producers if p in touching and graph.ops[p].type != "Const"]
        reads_gradient = any(p in gradients for p in op.producers)
        if reads_gradient or computed:
            gradients.add(name)
        said = computed if reads_gradient else op.producers
        layers = set().union(*(touching.get(p, set()) for p in said))
        layer_of[name] = max(
            (layer for layer in layers if below_all >> layer & 1), default=below_all.bit_length() - 1
        )
    return layer_of


def _weight_grads_away(
    graph: TrainingGraph,
    touching: Mapping[str, set[int]],
    output_grads: Mapping[str, int],
    of_loops: Mapping[str, int],
) -> dict[str, int]:
    """Return dW ops that run with the layer that used the weight, not with the weight's own layer.

    A weight that two layers use (an embedding that is the output's kernel) has gradients from both, computed
    where the activations are; its own layer adds them up.  If that layer was divided, its gradient comes down
    through the parts behind its weights, where its later loops are.
    """
    away: dict[str, int] = {}
    for name, op in graph.ops.items():
        if op.kind is not OpKind.WEIGHT_GRAD or op.layer is None:
            continue
        if of_loops.get(name, op.layer) > op.layer:
            away[name] = of_loops[name]
            continue
        # Constants do not tell: all equal ones were merged into one, which counts to any layer.
        computed = [p for p in op.producers if p in touching and graph.ops[p].type != "Const"]
        layers = set().union(*(touching[p] for p in computed))
        if layers and op.layer not in layers:
            above = [output_grads.get(p, away.get(p)) for p in op.producers]
            cap = min((layer for layer in above if layer is not None), default=max(layers))
            away[name] = max((layer for layer in layers if layer <= cap), default=cap)
            continue
        read = [p for p in op.producers if p in graph.ops and graph.ops[p].kind is OpKind.WEIGHT_GRAD]
        if not layers and read and len({away.get(p) for p in read}) == 1 and read[0] in away:
            away[name] = away[read[0]]
    _keep_going_down(graph, away)
    return away


def _handed_on(
    graph: TrainingGraph,
    forward: Mapping[str, int],
    touching: Mapping[str, set[int]],
    away: Mapping[str, int],
) -> set[str]:
    """Return dW ops that take a gradient from the layers above down to their weight's layer: they are dO.

    Only one layer's gradients need them, but a cut may separate them all the same.  The gradient of a weight
    that is used above its layer is left out: it goes to a sum.
    """
    of_data = ops_of_data(graph)
    using = layers_using(graph, forward, of_data)
    leading = _leading_home(graph, {name: touching[name] for name in of_data & touching.keys()}, away)
    handed_on: set[str] = set()
    for name in reversed(list(graph.ops)):
        at, home = away.get(name), graph.ops[name].layer
        if at is None or home is None:
            continue
        if home < at and (at not in using[home] or name in leading):
            handed_on.add(name)
        if name in handed_on:
            handed_on.update(producer for producer in graph.ops[name].producers if producer in away)
    return handed_on


def _leading_home(
    graph: TrainingGraph, activations: Mapping[str, set[int]], away: Mapping[str, int]
) -> set[str]:
    """Return dW ops that lead to one which reads activations of the weight's own layer."""
    leading: set[str] = set()
    for name in reversed(list(graph.ops)):
        op = graph.ops[name]
        if op.kind is not OpKind.WEIGHT_GRAD or op.layer is None:
            continue
        reads_home = name not in away and any(op.layer in activations.get(p, ()) for p in op.producers)
        if reads_home or name in leading:
            leading.update(p for p in op.producers if p in graph.ops and graph.ops[p].layer == op.layer)
    return leading


def _keep_going_down(graph: TrainingGraph, away: dict[str, int]) -> None:
    """Add the dW ops that read no activation and lead to one computed above their weight's layer."""
    for name in reversed(list(graph.ops)):
        if name not in away:
            continue
        for producer in graph.ops[name].producers:
            op = graph.ops.get(producer)
            if op is not None and op.kind is OpKind.WEIGHT_GRAD and op.layer is not None:
                away[producer] = max(away.get(producer, op.layer), away[name])


def tasks_for_costs(where: Where) -> dict[LayerTask, list[str]]:
    """Return the dO and dW tasks of layers, in the form in which costs are summed up."""
    ops: dict[LayerTask, list[str]] = {}
    for name, (kind, layer) in where.items():
        if kind in ("dO", "dW"):
            ops.setdefault((kind, layer), []).append(name)
    return ops
