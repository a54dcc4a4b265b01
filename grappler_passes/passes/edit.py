"""A copy of a GraphDef that can be changed by node name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.errors import GraphError
from grappler_passes.graph.node_input import split_input
from grappler_passes.graph.node_input import tensor as tensor


class GraphEditor:
    """Adds, rewires and removes nodes; the GraphDef it was made from stays as it is.

    ``removed``, ``added`` and ``opened`` (inputs changed) name the nodes concerned.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.graph_def = graph_protos.copy_of(graph_def)
        self.nodes: dict[str, node_def_pb2.NodeDef] = {node.name: node for node in self.graph_def.node}
        self.removed: set[str] = set()
        self.added: list[str] = []
        self.opened: set[str] = set()

    @property
    def modified(self) -> bool:
        return bool(self.removed or self.added or self.opened)

    def add(self, name: str, op: str, inputs: Iterable[str], device: str = "") -> node_def_pb2.NodeDef:
        """Append a node; GraphError if the name is taken."""
        if name in self.nodes:
            raise GraphError("the name of a node to add is taken", name)
        node = self.graph_def.node.add(name=name, op=op, input=inputs, device=device)
        self.nodes[name] = node
        self.added.append(name)
        return node

    def set_inputs(self, name: str, inputs: Iterable[str]) -> None:
        """Replace all inputs of a node; data inputs come first, repeated control inputs once."""
        unique = list(inputs)
        data = [text for text in unique if text[0] != "^"]
        control = list(dict.fromkeys(text for text in unique if text[0] == "^"))
        self.nodes[name].input[:] = data + control

    def map_inputs(self, name: str, replace: Callable[[str, int], list[str]]) -> None:
        """Rewrite each input: ``replace(producer, port)`` gives the inputs to have in its place."""
        inputs = [text for old in self.nodes[name].input for text in replace(*split_input(old))]
        self.set_inputs(name, inputs)

    def finish(self) -> graph_pb2.GraphDef:
        """Return the edited graph, without the removed nodes and references to them as colocation."""
        if not self.removed:
            return self.graph_def
        kept = (node for node in self.graph_def.node if node.name not in self.removed)
        result = graph_protos.with_nodes(self.graph_def, kept)
        for node in result.node:
            graph_protos.keep_colocations(node, lambda name: name not in self.removed)
        return result
