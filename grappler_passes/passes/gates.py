"""Rewires all readers past IdentityN, which hands several tensors on together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import GraphEditor, Pass, PassResult, Relaxation, tensor


@dataclass(frozen=True)
class GatesPass(Pass):
    """Lets no node read through an IdentityN: unlike in HLO, updates would wait for all gradients."""

    name: ClassVar[str] = "gates"
    relaxes = frozenset({Relaxation.COPIES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        gates = {node.name: list(node.input) for node in graph_def.node if node.op == "IdentityN"}
        if not gates:
            return PassResult(graph_def, False)
        editor = GraphEditor(graph_def)
        modified = False

        def behind(producer: str, port: int) -> list[str]:
            while producer in gates and port >= 0:
                producer, port = split_input(gates[producer][port])
            return [tensor(producer, port)]

        for node in graph_def.node:
            if any(split_input(text)[0] in gates for text in node.input):
                editor.map_inputs(node.name, behind)
                modified = True
        return PassResult(editor.graph_def, modified)
