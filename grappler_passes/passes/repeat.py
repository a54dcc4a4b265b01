"""Computes results of the forward pass again in the backward pass, so that they need not be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import data_inputs, split_input, tensor
from grappler_passes.errors import GraphError
from grappler_passes.graph.dependencies import has_side_effects
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import PassResult, Relaxation
from grappler_passes.passes.verify import VerifiedPass

# On a copy this attribute names the op that the copy repeats.
REPEATS_ATTR = "_ooo_repeats"
_SUFFIX = "/repeated"
# This attribute ties an op to another one's device; a copy does not need it.
_COLOCATED = "_class"


@dataclass(frozen=True)
class RepeatPass(VerifiedPass):
    """Copies the ops ``repeated``, and lets ``readers`` read the copies.

    A copy is the same op with the same attributes; it reads copies where there are some, else the same
    tensors, so its bits are the same.  An op with side effects or state cannot be repeated.
    """

    repeated: frozenset[str]
    readers: frozenset[str]
    name: ClassVar[str] = "repeat"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES})

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        nodes = {node.name: node for node in graph_def.node}
        for name in sorted(self.repeated | self.readers):
            if name not in nodes:
                raise GraphError("an op to repeat, or to read what is repeated, is not in the graph", name)
            if has_side_effects(nodes[name].op) or name + _SUFFIX in nodes:
                raise GraphError(f"a {nodes[name].op} cannot be repeated, or read what is", name)

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        if not self.repeated:
            return PassResult(graph_def, False)
        after = graph_protos.copy_of(graph_def)
        copies = [self._copy(node) for node in after.node if node.name in self.repeated]
        for node in after.node:
            if node.name in self.readers:
                node.input[:] = [self._read(text) for text in node.input]
        after.node.extend(copies)
        return PassResult(after, True, (), self.readers)

    def postconditions(
        self, before: graph_pb2.GraphDef, result: PassResult, training_graph: TrainingGraph | None
    ) -> None:
        super().postconditions(before, result, training_graph)
        old = {node.name: node for node in before.node}
        for node in result.graph_def.node if result.modified else ():
            original = old[node.name.removesuffix(_SUFFIX)] if node.name not in old else old[node.name]
            changed = node.name not in old or node.name in self.readers
            if changed and not _same(original, node):
                raise GraphError("is not what it repeats, or reads something else", node.name)

    def _copy(self, node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        copy.name = node.name + _SUFFIX
        copy.input[:] = map(self._read, data_inputs(node))
        copy.attr.pop(_COLOCATED, None)
        copy.attr[REPEATS_ATTR].s = node.name.encode()
        return copy

    def _read(self, text: str) -> str:
        name, port = split_input(text)
        return tensor(name + _SUFFIX, port) if name in self.repeated and text[0] != "^" else text


def repeats(graph_def: graph_pb2.GraphDef) -> dict[str, str]:
    """Return the op that each copy repeats, by the copy's name."""
    return {
        node.name: node.attr[REPEATS_ATTR].s.decode() for node in graph_def.node if REPEATS_ATTR in node.attr
    }


def _same(original: node_def_pb2.NodeDef, node: node_def_pb2.NodeDef) -> bool:
    """Return whether both are the same op with equal attributes, on the same tensors or copies of them."""
    attributes, copied = (
        {key: value for key, value in each.attr.items() if not key.startswith("_")}
        for each in (original, node)
    )
    inputs, read = (list(map(split_input, data_inputs(each))) for each in (original, node))
    bare = [(name.removesuffix(_SUFFIX), port) for name, port in read]
    return original.op == node.op and attributes == copied and inputs == bare
