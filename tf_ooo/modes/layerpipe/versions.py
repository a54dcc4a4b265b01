"""Chooses the weights for a backward pass: those of its forward pass, rebuilt ones or the latest.

A forward pass and its backward pass lie d rounds apart, and so do the weights of their layer.  ``stash``
keeps those of the forward pass in registers: exact, and d copies of the weights in the end.  ``ema``
(LayerPipe2, arXiv 2512.08160) rebuilds them, W(t-d) ~ W(t) + d G, where G is a moving average of the updates
(for plain SGD lr times the gradient) over about d steps: one copy, whatever d is.  ``latest`` takes W(t).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import has_side_effects, states_of
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, Relaxation, copy_of, tensor
from tf_ooo.modes.layerpipe.rounds import GIVEN, HIGH, Stages
from tf_ooo.modes.layerpipe.traced import Traced

NOW = "_ooo_now"


@dataclass(frozen=True)
class LaterWeight:
    """Describes a placeholder for weights that backward passes read instead of the forward pass's.

    ``handle`` is the variable's.  They read in ``round``, ``behind`` updates later than the forward pass.
    """

    name: str
    handle: str
    round: int
    behind: int


def with_later_weights(
    traced: Traced, weights: Mapping[str, int], stages: Stages
) -> tuple[Traced, tuple[LaterWeight, ...]]:
    """Return the step in which dO and dW read the weights, ``{handle: layer}``, from other inputs."""
    later = _Later(traced, weights, stages)
    for node in traced.graph_def.node:
        later.take(node)
    if not later.placeholders:
        return traced, ()
    change = LaterWeightsPass(tuple(later.added), later.inputs)
    return traced.rewritten(change, later.where, later.outputs), tuple(later.placeholders.values())


@dataclass(frozen=True)
class LaterWeightsPass(Pass):
    """Has backward passes read other weights than forward passes, from these ``inputs``.

    ``added``: placeholders for these weights, and copies of ops that depend on them alone.
    """

    added: tuple[node_def_pb2.NodeDef, ...]
    inputs: Mapping[str, Sequence[str]]
    name: ClassVar[str] = "later_weights"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        later = copy_of(graph_def)
        for node in later.node:
            if node.name in self.inputs:
                node.input[:] = self.inputs[node.name]
        later.node.extend(self.added)
        return PassResult(later, True, replaced=frozenset(self.inputs))


def from_weights(traced: Traced, weights: Collection[str]) -> dict[str, str]:
    """Return ``{op: handle}`` of forward ops that depend only on one weight and constants."""
    index = traced.index
    sources: dict[str, str] = {}
    constant: set[str] = set()
    for i in index.order:
        name, op = index.names[i], index.ops[i]
        if op == "ReadVariableOp" and traced.where.get(name, ("",))[0] == "F":
            (handle,) = states_of(index, i)
            if handle in weights:
                sources[name] = handle
            continue
        if op in GIVEN or has_side_effects(op):
            continue
        above = {index.names[p] for p, _ in index.data_preds[i]} - constant
        handles = {sources.get(p) for p in above}
        if not above:
            constant.add(name)
        elif len(handles) == 1 and (weight := handles.pop()) is not None:
            sources[name] = weight
    return sources


class _Later:
    """Finds the inputs of backward ops, op by op."""

    def __init__(self, traced: Traced, weights: Mapping[str, int], stages: Stages) -> None:
        self.traced, self.weights, self.stages = traced, weights, stages
        self.nodes = {node.name: node for node in traced.graph_def.node}
        self.sources = from_weights(traced, weights)
        self.placeholders: dict[str, LaterWeight] = {}
        self.where: dict[str, tuple[str, int]] = {}
        self.copies: dict[tuple[str, int], str] = {}
        self.outputs: dict[str, Sequence[OutputInfo]] = {}
        self.added: list[node_def_pb2.NodeDef] = []
        self.inputs: dict[str, list[str]] = {}

    def take(self, node: node_def_pb2.NodeDef) -> None:
        """Look at the inputs of a dO or dW op."""
        kind, layer = self.traced.where.get(node.name, ("", 0))
        if kind not in ("dO", HIGH, "dW"):
            return
        processor = self.stages.of[kind, layer]
        for place, text in enumerate(node.input):
            producer, port = split_input(text)
            if port < 0 or producer not in self.sources or self._behind(producer, processor) <= 0:
                continue
            copy = self._copy(producer, processor, (kind, layer))
            self.inputs.setdefault(node.name, list(node.input))[place] = tensor(copy, port)

    def _round(self, handle: str, processor: int) -> int:
        """Return the round in which a processor's backward passes read a variable, earlier if far away."""
        away = self.stages.of["dW", self.weights[handle]] != processor
        return self.stages.backward_round_on(processor) - away

    def _behind(self, producer: str, processor: int) -> int:
        handle = self.sources[producer]
        return self._round(handle, processor) - self.stages.read_round(self.weights[handle])

    def _copy(self, name: str, processor: int, at: tuple[str, int]) -> str:
        if (name, processor) in self.copies:
            return self.copies[name, processor]
        node, handle = self.nodes[name], self.sources[name]
        if node.op == "ReadVariableOp":
            copied = self._placeholder(name, handle, processor)
        else:
            copied = f"{name}/now_{processor}"
            copy = node_def_pb2.NodeDef()
            copy.CopyFrom(node)
            copy.name = copied
            copy.input[:] = [
                tensor(self._copy(producer, processor, at) if producer in self.sources else producer, port)
                for producer, port in map(split_input, node.input)
                if port >= 0
            ]
            self.added.append(copy)
            self.where[copied] = at
        self.outputs[copied] = self.traced.outputs[name]
        self.copies[name, processor] = copied
        return copied

    def _placeholder(self, name: str, handle: str, processor: int) -> str:
        """Return the placeholder through which a processor reads later weights than ``name`` does."""
        placeholder = f"{NOW}/{handle}/{processor}"
        if placeholder not in self.placeholders:
            at, behind = self._round(handle, processor), self._behind(name, processor)
            self.placeholders[placeholder] = LaterWeight(placeholder, handle, at, behind)
            node = node_def_pb2.NodeDef(name=placeholder, op="Placeholder")
            node.attr["dtype"].CopyFrom(self.nodes[name].attr["dtype"])
            self.added.append(node)
        return placeholder
