"""Lets a node wait for several ops of another device by one message instead of one for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import control_inputs, data_inputs
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import GraphEditor, Pass, PassResult, Relaxation

_SUFFIX = "/tf_ooo_gathered_"


@dataclass(frozen=True)
class GatherPass(Pass):
    """Puts a NoOp on each device for whose ops a NoOp elsewhere waits, if these are two or more.

    The end of a step waits for all updates: TensorFlow would send a message for each.  The new NoOp waits for
    nothing else, and so runs in the same loop and branch.
    """

    name: ClassVar[str] = "gather"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        editor = GraphEditor(graph_def)
        for node in [node for node in editor.graph_def.node if node.op == "NoOp"]:
            by_device: dict[str, list[str]] = {}
            for text in control_inputs(node):
                by_device.setdefault(editor.nodes[text[1:]].device, []).append(text)
            own = by_device.pop(node.device, [])
            if all(len(waits) < 2 for waits in by_device.values()):
                continue
            for number, (device, waits) in enumerate(sorted(by_device.items())):
                if len(waits) > 1:
                    waits[:] = [f"^{editor.add(f'{node.name}{_SUFFIX}{number}', 'NoOp', waits, device).name}"]
            others = [text for waits in by_device.values() for text in waits]
            editor.set_inputs(node.name, [*data_inputs(node), *own, *others])
            editor.opened.add(node.name)
        return PassResult(editor.finish(), editor.modified, (), frozenset(editor.opened))
