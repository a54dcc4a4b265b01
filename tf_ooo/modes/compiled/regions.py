"""Finds ops of a layer's dW that can run as one call on another stream, or says why they cannot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import is_stateful, split_input
from grappler_passes.compat.shape_inference import InferredOutputs, OutputInfo
from grappler_passes.errors import GraphError
from grappler_passes.graph.dependencies import GraphIndex, reached
from grappler_passes.graph.flow import CALL_OPS
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.compat import xla

GraphDef: TypeAlias = graph_pb2.GraphDef
Port = tuple[str, int]
# These are worth a kernel on another stream; XLA makes all else part of another kernel.
CONTRACTIONS = frozenset(
    {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "XlaDot", "XlaDotV2", "XlaConv",
     "XlaConvV2", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3D", "Conv3DBackpropFilterV2",
     "Conv3DBackpropInputV2", "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter",
     "DepthwiseConv2dNativeBackpropInput", "UnsortedSegmentSum", "TensorScatterAdd", "ScatterNd"}
)  # fmt: skip
_LOOPS = frozenset({"While", "StatelessWhile"})
# They move or rename data: cheap enough to be there twice.
VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "Const", "Cast", "Transpose"})
# A sum may have so many terms; more calls than this cost more than they gain.
_MOST_TERMS = 16
# Larger integers are data (token ids), not shapes or axes.
_MOST_CONSTANT_ELEMENTS = 64


@dataclass(frozen=True)
class Region:
    """Holds pure ops of static shape, closed under "between": no path leaves them and comes back.

    ``own`` are ops that nothing else needs; the other ``ops`` are views, which also stay outside.
    ``constants`` are inputs that XLA may have to know when it compiles: shapes and axes.
    """

    ops: tuple[str, ...]
    own: tuple[str, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: Mapping[Port, np.ndarray[Any, Any]] = field(default_factory=dict)


class FlatStep:
    """Holds a step's flat graph with loops as single ops, its shapes, and the readers of each tensor."""

    def __init__(self, graph_def: GraphDef, outputs: InferredOutputs, fetches: Sequence[str]):
        self.graph_def, self.outputs = graph_def, outputs
        self.nodes = {node.name: node for node in graph_def.node}
        self.fetches = [split_input(text) for text in fetches]
        self.readers: dict[str, list[tuple[str, int]]] = {name: [] for name in self.nodes}
        for node in graph_def.node:
            for producer, port in map(split_input, node.input):
                if producer in self.readers:
                    self.readers[producer].append((node.name, port))

    @cached_property
    def index(self) -> GraphIndex:
        return GraphIndex(self.graph_def)

    def info(self, port: Port) -> OutputInfo | None:
        """Return dtype and shape of a tensor; None where TensorFlow cannot tell."""
        infos = self.outputs.get(port[0], ())
        return infos[port[1]] if port[1] < len(infos) else None

    def known(self, port: Port) -> OutputInfo:
        """Describe a tensor that enters or leaves a region. GraphError where TensorFlow cannot tell."""
        info = self.info(port)
        if info is None:
            raise GraphError(f"the size of its output {port[1]} is not known", port[0])
        return info

    def is_float(self, port: Port) -> bool:
        info = self.info(port)
        return info is not None and info.dtype.startswith(("float", "bfloat"))

    def has(self, graph: TrainingGraph, name: str) -> bool:
        """Return whether an op of the classified graph is here, too: ops inside of loops are not."""
        return name in self.nodes and self.nodes[name].op == graph.ops[name].type

    def contractions(self, names: Iterable[str]) -> set[str]:
        """Return the ops that are worth a kernel on another stream."""
        return {name for name in names if self.nodes[name].op in CONTRACTIONS}

    def data_inputs(self, name: str) -> list[Port]:
        return [port for port in map(split_input, self.nodes[name].input) if port[1] >= 0]

    def readers_of(self, port: Port) -> list[str]:
        """Return the ops that read a tensor, once for each input."""
        return [reader for reader, number in self.readers[port[0]] if number == port[1]]

    def touched(self, name: str) -> list[Port]:
        return [*self.data_inputs(name), *((name, port) for port in range(len(self.outputs.get(name, ()))))]

    def behind(self, names: Iterable[str]) -> set[str]:
        """Return the ops that depend on these, themselves included."""
        return reached(names, lambda name: [reader for reader, _ in self.readers[name]])

    def above(self, names: Iterable[str], inside: Container[str] | None = None) -> set[str]:
        """Return the ops within ``inside`` on which these depend, themselves included."""
        return reached(
            names, lambda name: [n for n, _ in self.data_inputs(name) if inside is None or n in inside]
        )


def find_regions(step: FlatStep, graph: TrainingGraph, names: Iterable[str]) -> list[Region] | str:
    """Return a region for each gradient of a layer's dW ops that takes real work, or why there is none.

    Each region has one result, because XLA waits for such a call as late as it can, but for a call of several
    results where it first takes them apart.  Sums over dO stay where they are: XLA makes them part of the
    kernel that computes that dO.

    ``graph`` is the classified step with loops lowered: an op found only in it belongs to a loop.
    """
    names = list(names)
    outside = [n for n in names if not step.has(graph, n)]
    chosen = {n for n in names if n not in outside and is_pure(step, n) and has_static_borders(step, n)}
    if not step.contractions(chosen):
        return _why_none(step, names, outside)
    ordered = tuple(name for name in graph.ops if name in chosen)
    regions = [region_of(step, ops, own) for ops, own in _parts(step, ordered)]
    return [region for region in regions if _is_convex(step, set(region.own))] or (
        "its gradient leaves these ops and comes back to them"
    )


def _parts(step: FlatStep, ops: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return (all ops, own ops) for each result that takes a contraction of its own.

    Ops that several results need stay outside, except views.  Results that share all their contractions (one
    gradient that is cut into several) are one part.
    """
    needs = _needs(step, ops)
    in_use = Counter(name for of in needs.values() for name in of)
    alone = [port for port, of in needs.items() if step.contractions(n for n in of if in_use[n] == 1)]
    groups = [{port} for port in alone]
    taken = set().union(*(needs[port] for port in alone))
    rest = {port: of for port, of in needs.items() if port not in alone}
    for port, of in rest.items():
        heavy = step.contractions(of - taken)
        if heavy and not any(port in group for group in groups):
            groups.append({other for other, theirs in rest.items() if heavy & theirs})
    parts = []
    for group in groups:
        mine = set().union(*(needs[port] for port in group))
        of_rest = set().union(*(of for port, of in needs.items() if port not in group))
        kept = tuple(n for n in ops if n in mine and (n not in of_rest or step.nodes[n].op in VIEWS))
        parts.append((kept, tuple(n for n in kept if n not in of_rest)))
    return parts


def _needs(step: FlatStep, ops: Sequence[str]) -> dict[Port, set[str]]:
    """Return for each result the ops within ``ops`` from which it is computed.

    A sum over several contractions (one for each step of an unrolled recurrence) is left out: each of its
    terms is a result, and the sum stays on the main stream.
    """
    inside, results, cut = set(ops), [], set()
    stack = _results(step, ops, ops)
    while stack:
        port = stack.pop()
        terms = [p for p in step.data_inputs(port[0]) if p[0] in inside]
        if step.nodes[port[0]].op == "AddN" and 2 <= len(terms) <= _MOST_TERMS:
            cut.add(port[0])
            stack += terms
        elif port not in results:
            results.append(port)
    return {port: step.above([port[0]], inside - cut) for port in sorted(results)}


def _results(step: FlatStep, own: Iterable[str], ops: Iterable[str]) -> list[Port]:
    """Return the tensors of ``own`` that ops outside of ``ops`` read."""
    own, inside = set(own), set(ops)
    used = {(n, p) for n in own for reader, p in step.readers[n] if p >= 0 and reader not in inside}
    return sorted(used | {fetch for fetch in step.fetches if fetch[0] in own})


def is_pure(step: FlatStep, name: str) -> bool:
    """Return whether an op has no state and no call, and only numbers go in and out."""
    op = step.nodes[name].op
    if is_stateful(op) or op in CALL_OPS - {"StatelessWhile", "StatelessIf"} or op == "Placeholder":
        return False
    infos = map(step.info, step.touched(name))
    return all(info is not None and info.dtype in xla.MLIR_TYPES for info in infos)


def has_static_borders(step: FlatStep, name: str) -> bool:
    """Return whether the sizes of all tensors that an op reads and makes are known."""
    return all(
        info is not None and info.shape is not None and None not in info.shape
        for info in map(step.info, step.touched(name))
    )


def _why_none(step: FlatStep, names: Sequence[str], outside: Sequence[str]) -> str:
    ops = {name: step.nodes[name].op for name in names if name in step.nodes}
    if outside or not _LOOPS.isdisjoint(ops.values()):
        return "its gradient is computed in a loop, together with dO"
    for name, op in ops.items():
        if not is_pure(step, name):
            return f"{name} ({op}) cannot be moved: it has state or holds no numbers"
    for name, op in ops.items():
        if not has_static_borders(step, name):
            return f"{name} ({op}): sizes that are known only when the step runs"
    return "it has no matrix product or convolution; XLA makes it part of the kernel of dO"


def _is_convex(step: FlatStep, chosen: set[str]) -> bool:
    """Return whether no path leads from the region through other ops back into it."""
    outside = {reader for name in chosen for reader, _ in step.readers[name]} - chosen
    return step.behind(outside).isdisjoint(chosen)


def region_of(step: FlatStep, ops: tuple[str, ...], own: tuple[str, ...]) -> Region:
    """Return the region of these ops, with its inputs and results."""
    chosen = set(ops)
    inputs: dict[Port, None] = {}
    constants: dict[Port, np.ndarray[Any, Any]] = {}
    for name in ops:
        for port in step.data_inputs(name):
            if port[0] in chosen or port in inputs or port in constants:
                continue
            if (value := _constant(step, port)) is None:
                inputs[port] = None
            else:
                constants[port] = value
    return Region(ops, own, tuple(inputs), tuple(_results(step, own, ops)), constants)


def _constant(step: FlatStep, port: Port) -> np.ndarray[Any, Any] | None:
    info = step.info(port)
    if info is None or not info.dtype.startswith(("int", "uint", "bool")) or info.shape is None:
        return None
    if math.prod(dim or 0 for dim in info.shape) > _MOST_CONSTANT_ELEMENTS:
        return None
    if step.nodes[port[0]].op == "ShapeN":  # TensorFlow's evaluator knows Shape only
        measured = step.info(step.data_inputs(port[0])[port[1]])
        if measured is not None and measured.shape is not None and None not in measured.shape:
            return np.asarray(measured.shape, info.dtype)
    value = step.outputs.constant(*port)
    return None if value is None else np.asarray(value)
