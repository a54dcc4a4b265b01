"""Puts regions of dW into functions of their own, called on a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import function_pb2, node_def_pb2

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.node_input import split_input
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult
from grappler_passes.passes.edit import GraphEditor, tensor
from grappler_passes.passes.relaxations import Relaxation
from tf_ooo.compat import xla_nodes
from tf_ooo.modes.compiled.regions import FlatStep, GraphDef, Port, Region

CALL_PREFIX = "ooo_dW"


@dataclass(frozen=True)
class Call:
    """A region on a side stream.

    ``waits_for`` are tensors of the main stream that have to be there before the call may start,
    besides its inputs.  ``delayed``: into the next step's forward pass; no join waits for it.  ``wave``: how
    many other calls of its step it needs the results of, one after the other.
    """

    name: str
    region: Region
    stream: int
    waits_for: tuple[Port, ...] = ()
    delayed: bool = False
    wave: int = 0


def results_of(calls: Sequence[Call]) -> dict[Port, Port]:
    """Map each tensor that leaves a region to where it is once the calls are in place."""
    return {port: (call.name, number) for call in calls for number, port in enumerate(call.region.outputs)}


@dataclass(frozen=True)
class OutlinePass(Pass):
    """Replaces each region by its call; ``moved``: where the tensors that calls read or return now are."""

    step: FlatStep
    calls: Sequence[Call]
    moved: Mapping[Port, Port]
    name: ClassVar[str] = "outline"
    relaxes = frozenset(
        {
            Relaxation.NEW_NODES,
            Relaxation.REPLACED_NODES,
            Relaxation.SIDE_EFFECTS,  # updates read what a call returns
            Relaxation.FUNCTIONS,
            Relaxation.MORE_WAITS,  # who waited for an op waits for the call it is in
            Relaxation.FEWER_WAITS,  # a call waits for its inputs alone
            Relaxation.DEVICES,
        }
    )

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Views that other ops read, too, also stay outside."""
        editor = GraphEditor(graph_def)
        for call in self.calls:
            inputs = [tensor(*self.moved.get(port, port)) for port in call.region.inputs]
            function, node = call_of(self.step, call.name, call.region, inputs, call.stream)
            editor.graph_def.library.function.append(function)
            editor.add(call.name, node.op, inputs).CopyFrom(node)
        gone = {name: call.name for call in self.calls for name in call.region.own}
        editor.removed.update(gone)

        def replace(producer: str, port: int) -> list[str]:
            if producer not in gone:
                return [tensor(producer, port)]
            return [f"^{gone[producer]}"] if port < 0 else [tensor(*self.moved[producer, port])]

        readers = {reader for name in gone for reader, _ in self.step.readers[name]} - gone.keys()
        for reader in sorted(readers):
            editor.map_inputs(reader, replace)
        return PassResult(editor.finish(), editor.modified, replaced=frozenset({*gone, *readers}))


def call_of(
    step: FlatStep, name: str, region: Region, inputs: Sequence[str], stream: int | None
) -> tuple[function_pb2.FunctionDef, node_def_pb2.NodeDef]:
    """Return a region's function and the op that calls it; ``stream`` None: where the op stands."""
    given, returned = ([step.known(port) for port in ports] for ports in (region.inputs, region.outputs))
    function = xla_nodes.unique_name(name)
    if stream is None:
        node = xla_nodes.plain_call_node(name, function, inputs, (given, returned))
    else:
        module = module_text(given, returned)
        node = xla_nodes.call_node(name, stream, function, module, inputs, (given, returned))
    return _function_of(step, region, function), node


def _function_of(step: FlatStep, region: Region, name: str) -> function_pb2.FunctionDef:
    given = [step.known(port) for port in region.inputs]
    names = {port: f"input_{number}" for number, port in enumerate(region.inputs)}
    names |= {port: f"constant_{number}" for number, port in enumerate(region.constants)}
    nodes = GraphDef(versions=step.graph_def.versions)
    nodes.library.CopyFrom(step.graph_def.library)
    for port, value in region.constants.items():
        nodes.node.append(xla_nodes.constant_node(names[port], value))
    for op in region.ops:
        node = nodes.node.add()
        node.CopyFrom(step.nodes[op])
        node.device = ""
        node.attr.pop("_class", None)
        ports = [port for port in map(split_input, node.input) if port[1] >= 0]
        del node.input[:]
        node.input.extend(names.get(port, tensor(*port)) for port in ports)
    arguments = [(names[port], i.dtype, i.shape) for port, i in zip(region.inputs, given, strict=True)]
    function: function_pb2.FunctionDef = xla_nodes.function_def(
        name, nodes, arguments, [f"{op}:{port}" for op, port in region.outputs]
    )
    return function


def module_text(given: Sequence[OutputInfo], returned: Sequence[OutputInfo]) -> str:
    """Return the stablehlo module of an ``XlaCallModule`` that does nothing but call its first function."""
    ins, outs = (", ".join(map(_mlir_type, infos)) for infos in (given, returned))
    arguments = ", ".join(f"%arg{i}" for i in range(len(given)))
    declared = ", ".join(f"%arg{i}: {_mlir_type(info)}" for i, info in enumerate(given))
    results = ", ".join(f"%0#{i}" for i in range(len(returned))) if len(returned) > 1 else "%0"
    count = f":{len(returned)}" if len(returned) > 1 else ""
    config = 'caller_name = "XlaCallModule", called_index = 0 : i64, has_token_input_output = false'
    return (
        f"module @ooo {{ func.func public @main({declared}) -> ({outs}) {{\n"
        f" %0{count} = stablehlo.custom_call @tf.call_tf_function({arguments}) "
        f"{{tf.backend_config = {{{config}}}, api_version = 2 : i32}} : ({ins}) -> ({outs})\n"
        f" return {results} : {outs} }} }}"
    )


def _mlir_type(info: OutputInfo) -> str:
    dims = "".join(f"{dim}x" for dim in info.shape or ())
    return f"tensor<{dims}{xla_nodes.MLIR_TYPES[info.dtype]}>"
