"""Gives each device its own copy of the constants that its ops read, so that nothing has to be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.graph.dependencies import has_side_effects
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, Relaxation, copy_of

_SUFFIX = "/tf_ooo_copy_"


@dataclass(frozen=True)
class LocalConstantsPass(Pass):
    """Moves a constant to the device of its readers; if they are on several devices, the others get copies.

    Ops with side effects and results keep their inputs as they are.
    """

    name: ClassVar[str] = "local_constants"
    relaxes = frozenset({Relaxation.DEVICES, Relaxation.NEW_NODES, Relaxation.REPLACED_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        after = copy_of(graph_def)
        constants = {node.name: node for node in after.node if node.op == "Const"}
        readers: dict[str, dict[str, list[tuple[int, int]]]] = {}
        fixed: dict[str, str] = {}
        for n, node in enumerate(after.node):
            for place, text in enumerate(node.input):
                producer, port = split_input(text)
                if port < 0 or producer not in constants:
                    continue
                if has_side_effects(node.op) or node.op == "_Retval":
                    fixed.setdefault(producer, node.device)
                else:
                    readers.setdefault(producer, {}).setdefault(node.device, []).append((n, place))
        replaced: set[str] = set()
        modified = False
        for name, constant in constants.items():
            by_device = readers.get(name, {})
            home = fixed.get(name) or min(by_device, default=constant.device)
            if constant.device != home:
                constant.device, modified = home, True
            for number, device in enumerate(sorted(by_device.keys() - {home})):
                copy = after.node.add()
                copy.CopyFrom(constant)
                copy.name, copy.device = f"{name}{_SUFFIX}{number}", device
                for n, place in by_device[device]:
                    after.node[n].input[place] = copy.name
                    replaced.add(after.node[n].name)
                modified = True
        return PassResult(after, modified, (), frozenset(replaced))
