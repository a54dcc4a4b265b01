"""Which weights a backward pass multiplies with: those of its forward pass, rebuilt ones or the latest.

A forward pass and its backward pass lie d rounds apart, and so do the weights of their layer.  ``stash``
keeps those of the forward pass in registers: exact, and d copies of the weights in the end.  ``ema``
(LayerPipe2, arXiv 2512.08160) rebuilds them, W(t-d) ~ W(t) + d G, where G is a moving average of what the
updates take off the weights (for plain SGD lr times the gradient) over about d updates: one copy, whatever
d is.  ``latest`` takes W(t).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import has_side_effects, only_reads, states_of
from grappler_passes.graph.node_input import split_input
from tf_ooo.modes.layerpipe.stages import HIGH, Stages
from tf_ooo.modes.layerpipe.traced import Traced

NOW = "_ooo_now"


@dataclass(frozen=True)
class Now:
    """The weights that a processor's backward passes use, in place of those of the forward pass.

    Attributes:
        name: the placeholder for them.
        handle: of the variable.
        round: in which they are read.
        behind: how many updates later than the forward pass's reading that is.
    """

    name: str
    handle: str
    round: int
    behind: int


def with_later_weights(
    traced: Traced, weights: Mapping[str, int], stages: Stages
) -> tuple[Traced, tuple[Now, ...]]:
    """The step with other inputs for the weights that dO and dW read.

    Args:
        traced: the step.
        weights: ``{handle: layer}``.
        stages: where tasks run.
    """
    maker = _Maker(traced, weights, stages)
    for node in maker.graph_def.node[: len(traced.graph_def.node)]:
        maker.take(node)
    if not maker.now:
        return traced, ()
    made = dataclasses.replace(
        traced,
        graph_def=maker.graph_def,
        index=GraphIndex(maker.graph_def),
        where={**traced.where, **maker.where},
        outputs={**maker.outputs(), **maker.outputs_of_copies},
    )
    return made, tuple(maker.now.values())


def from_weights(traced: Traced, weights: Collection[str]) -> dict[str, str]:
    """``{op: handle}`` of forward ops that depend on one weight and on nothing else but constants."""
    index, found = traced.index, {}
    constant: set[str] = set()
    for i in index.order:
        name, op = index.names[i], index.ops[i]
        if op == "ReadVariableOp" and traced.where.get(name, ("",))[0] == "F":
            handle = next(iter(states_of(index, i)))
            if handle in weights:
                found[name] = handle
            continue
        above = [index.names[p] for p, _ in index.data_preds[i]]
        if op in ("Placeholder", "_Arg") or has_side_effects(op):
            continue
        if all(p in constant for p in above):
            constant.add(name)
            continue
        handles = {found[p] for p in above if p in found}
        if len(handles) == 1 and all(p in found or p in constant for p in above):
            found[name] = handles.pop()
    return found


class _Maker:
    def __init__(self, traced: Traced, weights: Mapping[str, int], stages: Stages) -> None:
        self.traced, self.weights, self.stages = traced, weights, stages
        self.graph_def = type(traced.graph_def)()
        self.graph_def.CopyFrom(traced.graph_def)
        self.nodes = {node.name: node for node in traced.graph_def.node}
        self.sources = from_weights(traced, weights)
        self.now: dict[str, Now] = {}
        self.where: dict[str, tuple[str, int]] = {}
        self.copies: dict[tuple[str, int], str] = {}
        self.outputs_of_copies: dict[str, Any] = {}

    def outputs(self) -> dict[str, Any]:
        """Of the ops of the step."""
        return {name: self.traced.outputs[name] for name in self.nodes}

    def take(self, node: Any) -> None:
        """Rewires a dO or dW op."""
        kind, layer = self.traced.where.get(node.name, ("", 0))
        if kind not in ("dO", HIGH, "dW"):
            return
        processor = self.stages.of[kind, layer]
        for place, text in enumerate(node.input):
            producer, port = split_input(text)
            if port < 0 or producer not in self.sources or self._behind(producer, processor) <= 0:
                continue
            copy = self._copy(producer, processor, (kind, layer))
            node.input[place] = copy if port == 0 else f"{copy}:{port}"

    def _round(self, handle: str, processor: int) -> int:
        """In which a processor's backward passes read a variable: a round before, if it comes from afar."""
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
            made = f"{NOW}/{handle}/{processor}"
            self.now.setdefault(
                made, Now(made, handle, self._round(handle, processor), self._behind(name, processor))
            )
            if made not in self.outputs_of_copies:
                copy = self.graph_def.node.add(name=made, op="Placeholder")
                copy.attr["dtype"].CopyFrom(node.attr["dtype"])
        else:
            made = f"{name}/now_{processor}"
            copy = self.graph_def.node.add()
            copy.CopyFrom(node)
            copy.name = made
            inputs = []
            for text in node.input:
                producer, port = split_input(text)
                if producer in self.sources:
                    producer = self._copy(producer, processor, at)
                if port >= 0:
                    inputs.append(producer if port == 0 else f"{producer}:{port}")
            del copy.input[:]
            copy.input.extend(inputs)
            self.where[made] = at
        self.outputs_of_copies[made] = self.traced.outputs[name]
        self.copies[name, processor] = made
        return made


def writes(index: GraphIndex) -> dict[str, list[str]]:
    """The ops that change each variable, by its handle."""
    found: dict[str, list[str]] = {}
    for i, op in enumerate(index.ops):
        if has_side_effects(op) and not only_reads(op):
            for handle in states_of(index, i):
                found.setdefault(handle, []).append(index.names[i])
    return found
