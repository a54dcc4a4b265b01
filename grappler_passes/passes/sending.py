"""Lets less be sent: constants have copies, a variable is read once, a device says once that it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.errors import PlanError
from grappler_passes.graph.dependencies import has_side_effects, only_reads
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import GraphEditor, Pass, PassResult, Relaxation, copy_of

_SUFFIX = "/tf_ooo_copy_"
_GATHERED = "/tf_ooo_gathered_"


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


@dataclass(frozen=True)
class ReadOncePass(Pass):
    """Rewires the readers of each key of ``stands_for`` to the op that stands for it.

    The replaced reads stay, and the one that stands for them waits for them: a write of the variable still
    comes after all of them.  Ops with side effects keep their inputs.
    """

    stands_for: Mapping[str, str]
    name: ClassVar[str] = "read_once"
    relaxes = frozenset({Relaxation.REPLACED_NODES, Relaxation.MORE_WAITS})

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        ops = {node.name: node.op for node in graph_def.node}
        for name in {*self.stands_for, *self.stands_for.values()}:
            if not only_reads(ops.get(name, "")):
                raise PlanError(f"{name!r} is no op that reads a variable")

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        after = copy_of(graph_def)
        replaced: set[str] = set()
        stood_for: dict[str, list[str]] = {}
        for name, first in self.stands_for.items():
            stood_for.setdefault(first, []).append(name)
        for node in after.node:
            node.input.extend(f"^{name}" for name in stood_for.get(node.name, ()))
            for place, text in enumerate([] if has_side_effects(node.op) else node.input):
                producer, port = split_input(text)
                if port >= 0 and producer in self.stands_for:
                    node.input[place] = self.stands_for[producer]
                    replaced.add(node.name)
        return PassResult(after, bool(self.stands_for), (), frozenset(replaced))


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
            for text in node.input:
                by_device.setdefault(editor.nodes[text[1:]].device, []).append(text)
            several = {device for device, waits in by_device.items() if len(waits) > 1}
            far = sorted(several - {node.device})
            for number, device in enumerate(far):
                name = f"{node.name}{_GATHERED}{number}"
                editor.add(name, "NoOp", by_device[device], device)
                by_device[device] = [f"^{name}"]
            if far:
                editor.set_inputs(node.name, (text for waits in by_device.values() for text in waits))
                editor.opened.add(node.name)
        return PassResult(editor.finish(), editor.modified, (), frozenset(editor.opened))
