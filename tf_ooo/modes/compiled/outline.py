"""Puts regions of dW into functions called on a stream, and back in place to verify the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import function_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import split_input
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.errors import VerifyError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import GraphEditor, Pass, PassResult, Relaxation, tensor
from grappler_passes.passes.verify import verify
from tf_ooo.compat import func_graphs, xla
from tf_ooo.modes.compiled.regions import FlatStep, GraphDef, Port, Region
from tf_ooo.rewriting.compile_tasks import CompileTasksPass

CALL_PREFIX = "ooo_dW"


@dataclass(frozen=True)
class Call:
    """Represents a region on a side stream.

    ``waits_for`` are tensors of the main stream that have to be there before the call may start,
    besides its inputs.  ``delayed``: into the next step's forward pass; no join waits for it.  ``wave``: the
    length of the chain of other calls in its step whose results it needs.
    """

    name: str
    region: Region
    stream: int
    waits_for: tuple[Port, ...] = ()
    delayed: bool = False
    wave: int = 0


@dataclass(frozen=True)
class OutlinePass(Pass):
    """Replaces each region by its call; ``moved``: the new ports of tensors that calls read or return."""

    step: FlatStep
    calls: Sequence[Call]
    moved: Mapping[Port, Port]
    name: ClassVar[str] = "outline"
    relaxes = CompileTasksPass.relaxes | {Relaxation.DEVICES}

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Outline the regions; views that other ops also read stay outside, too."""
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
    """Return a region's function and the op that calls it; ``stream`` None: on the main stream."""
    infos = [step.known(port) for port in region.inputs], [step.known(port) for port in region.outputs]
    function = func_graphs.unique_name(name)
    if stream is None:
        node = xla.plain_call_node(name, function, inputs, infos)
    else:
        node = xla.call_node(name, stream, function, module_text(*infos), inputs, infos)
    return _function_of(step, region, function), node


def _function_of(step: FlatStep, region: Region, name: str) -> function_pb2.FunctionDef:
    names = {port: f"input_{number}" for number, port in enumerate(region.inputs)}
    names |= {port: f"constant_{number}" for number, port in enumerate(region.constants)}
    constants = [xla.constant_node(names[port], value) for port, value in region.constants.items()]
    nodes = GraphDef(node=[*constants, *(step.nodes[op] for op in region.ops)]).node
    for node in nodes[len(constants) :]:
        node.device = ""
        node.attr.pop("_class", None)
        node.input[:] = [names.get(port, tensor(*port)) for port in step.data_inputs(node.name)]
    arguments = [(names[port], step.known(port).dtype) for port in region.inputs]
    results = [(f"{op}:{port}", step.known((op, port)).dtype) for op, port in region.outputs]
    function: function_pb2.FunctionDef = func_graphs.function_def(name, nodes, arguments, results)
    return function


def module_text(given: Sequence[OutputInfo], returned: Sequence[OutputInfo]) -> str:
    """Return the stablehlo module of an ``XlaCallModule`` that only calls its first function."""
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
    return f"tensor<{dims}{xla.MLIR_TYPES[info.dtype]}>"


# Verifies a step with calls on streams: put back in place of its calls, it must equal the original step.
# Calls become the ops of their functions, and readers behind a barrier read its inputs. Remaining differences
# from the original are found by :func:`grappler_passes.passes.verify.verify`.

_BARRIER = "XlaOptimizationBarrier"
_PUT_BACK = frozenset(
    {Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS, Relaxation.FUNCTIONS}
)


@dataclass(frozen=True)
class VerifyStreamsPass(Pass):
    """Changes nothing; refuses a graph that, put back, differs by more than the passes ``declared``.

    ``fetches``: the present port of each result of the original.
    """

    original: GraphDef
    calls: Sequence[Call]
    fetches: Mapping[Port, Port]
    declared: frozenset[Relaxation]
    name: ClassVar[str] = "verify"

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        GraphIndex(graph_def)  # raises where a barrier closes a cycle
        step = _PutBack(self.original, graph_def, self.calls)
        verify(self.original, step.graph_def(), relaxes=self.declared - _PUT_BACK)
        for was, now in self.fetches.items():
            if step.source(now) != was:
                raise VerifyError(now[0], "results", f"output {now[1]} is not {tensor(*was)}")
        return PassResult(graph_def, modified=False)


class _PutBack:
    """Holds the nodes of a graph with calls, and maps each tensor to the original's."""

    def __init__(self, original: GraphDef, graph_def: GraphDef, calls: Sequence[Call]) -> None:
        self._whole = graph_def
        self._functions = {function.signature.name: function for function in graph_def.library.function}
        self._called: set[str] = set()
        self._stands_for: dict[Port, str] = {}
        self._own = {call.name: call.region.own for call in calls}
        there = {node.name for node in original.node}
        self._nodes: dict[str, node_def_pb2.NodeDef] = {}
        by_name = {node.name: node for node in graph_def.node}
        for node in graph_def.node:
            if node.op == _BARRIER and node.name not in there:
                self._stands_for |= {(node.name, i): text for i, text in enumerate(node.input)}
            elif node.name not in self._own:
                self._nodes[node.name] = node
        for call in calls:
            if call.name not in by_name:
                raise VerifyError(call.name, "calls", "it is not in the graph")
            self._open(call, by_name[call.name])

    def _open(self, call: Call, node: node_def_pb2.NodeDef) -> None:
        """Put the ops of a call's function back under their own names."""
        function = self._functions[node.attr["function_list"].list.func[0].name]
        self._called.add(function.signature.name)
        given = {arg.name: text for arg, text in zip(function.signature.input_arg, node.input, strict=False)}
        for number, (port, value) in enumerate(call.region.constants.items()):
            given[f"constant_{number}"] = tensor(*port)
            expected = xla.constant_node(f"constant_{number}", value)
            constants = (inner for inner in function.node_def if inner.name == expected.name)
            if any(inner.attr["value"] != expected.attr["value"] for inner in constants):
                raise VerifyError(expected.name, "calls", f"has another value in {function.signature.name!r}")
        ports = func_graphs.ports_of(function)
        for inner in function.node_def:
            if inner.name in given:
                continue
            opened = node_def_pb2.NodeDef()
            opened.CopyFrom(inner)
            opened.input[:] = [given.get(ports[text][0]) or tensor(*ports[text]) for text in inner.input]
            copied = self._nodes.setdefault(opened.name, opened)
            if not self._same(copied, opened):
                raise VerifyError(opened.name, "calls", f"is another op in call {call.name!r}")
        for number, result in enumerate(function.signature.output_arg):
            port = ports[function.ret[result.name]]
            self._stands_for[call.name, number] = given.get(port[0]) or tensor(*port)

    def _same(self, node: node_def_pb2.NodeDef, copied: node_def_pb2.NodeDef) -> bool:
        """Return whether a view and its copy in a call are equal."""
        inputs = [[self.source(split_input(t)) for t in n.input if t[0] != "^"] for n in (node, copied)]
        keys = {key for key in (*node.attr, *copied.attr) if not key.startswith("_")}
        return (
            node.op == copied.op
            and inputs[0] == inputs[1]
            and all(key in n.attr for key in keys for n in (node, copied))
            and all(node.attr[key] == copied.attr[key] for key in keys)
        )

    def source(self, port: Port) -> Port:
        """Return the original tensor that a port stands for."""
        while port in self._stands_for:
            port = split_input(self._stands_for[port])
        return port

    def graph_def(self) -> GraphDef:
        graph_def = graph_protos.with_nodes(self._whole, self._nodes.values())
        kept = [f for f in self._whole.library.function if f.signature.name not in self._called]
        del graph_def.library.function[:]
        graph_def.library.function.extend(kept)
        for node in graph_def.node:
            node.input[:] = [text for old in node.input for text in self._inputs(old)]
        return graph_def

    def _inputs(self, text: str) -> list[str]:
        name, port = split_input(text)
        if port < 0:  # who waits for a call waits for all that is in it
            return [f"^{own}" for own in self._own.get(name, (name,))]
        return [tensor(*self.source((name, port)))]
