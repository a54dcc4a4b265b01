"""Verifies a step with calls on streams: put back in place of its calls, it must be the step that came.

Calls become the ops of their functions, and whoever reads through a barrier reads what went in.  What then
differs from the original is found by :func:`grappler_passes.passes.verify.verify`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import node_def_pb2

from grappler_passes.compat import op_types
from grappler_passes.errors import VerifyError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.node_input import split_input
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult
from grappler_passes.passes.edit import tensor
from grappler_passes.passes.relaxations import Relaxation
from grappler_passes.passes.verify import verify
from tf_ooo.compat import xla_nodes
from tf_ooo.modes.compiled.outline import Call
from tf_ooo.modes.compiled.regions import GraphDef, Port

_BARRIER = "XlaOptimizationBarrier"
_PUT_BACK = frozenset(
    {Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS, Relaxation.FUNCTIONS}
)


@dataclass(frozen=True)
class VerifyStreamsPass(Pass):
    """Changes nothing; refuses a graph that, put back, differs in more than the passes ``declared``.

    ``fetches``: for each result of the original where it is now.
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
    """The nodes of a graph with calls, and what each tensor is in the original."""

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
        """The ops of a call's function under their own names."""
        function = self._functions[node.attr["function_list"].list.func[0].name]
        self._called.add(function.signature.name)
        given = {arg.name: text for arg, text in zip(function.signature.input_arg, node.input, strict=False)}
        for number, (port, value) in enumerate(call.region.constants.items()):
            given[f"constant_{number}"] = tensor(*port)
            expected = xla_nodes.constant_node(f"constant_{number}", value)
            constants = (inner for inner in function.node_def if inner.name == expected.name)
            if any(inner.attr["value"] != expected.attr["value"] for inner in constants):
                raise VerifyError(expected.name, "calls", f"has another value in {function.signature.name!r}")
        body = {inner.name: inner for inner in function.node_def if inner.name not in given}
        for inner in body.values():
            opened = node_def_pb2.NodeDef()
            opened.CopyFrom(inner)
            texts = [_input_of(body, text) for text in inner.input]
            opened.input[:] = [given.get(split_input(text)[0], text) for text in texts]
            copied = self._nodes.setdefault(opened.name, opened)
            if not self._same(copied, opened):
                raise VerifyError(opened.name, "calls", f"is another op in call {call.name!r}")
        for number, result in enumerate(function.signature.output_arg):
            text = _input_of(body, function.ret[result.name])
            self._stands_for[call.name, number] = given.get(split_input(text)[0], text)

    def _same(self, node: node_def_pb2.NodeDef, copied: node_def_pb2.NodeDef) -> bool:
        """Return whether a view and its copy in a call say the same."""
        inputs = [[self.source(split_input(t)) for t in n.input if t[0] != "^"] for n in (node, copied)]
        keys = {key for key in (*node.attr, *copied.attr) if not key.startswith("_")}
        return (
            node.op == copied.op
            and inputs[0] == inputs[1]
            and all(key in n.attr for key in keys for n in (node, copied))
            and all(node.attr[key] == copied.attr[key] for key in keys)
        )

    def source(self, port: Port) -> Port:
        """Return the original tensor behind one."""
        while port in self._stands_for:
            port = split_input(self._stands_for[port])
        return port

    def graph_def(self) -> GraphDef:
        graph_def = GraphDef(versions=self._whole.versions)
        graph_def.library.CopyFrom(self._whole.library)
        kept = [f for f in self._whole.library.function if f.signature.name not in self._called]
        del graph_def.library.function[:]
        graph_def.library.function.extend(kept)
        for node in self._nodes.values():
            copy = graph_def.node.add()
            copy.CopyFrom(node)
            copy.input[:] = [text for old in node.input for text in self._inputs(old)]
        return graph_def

    def _inputs(self, text: str) -> list[str]:
        name, port = split_input(text)
        if port < 0:  # who waits for a call waits for all that is in it
            return [f"^{own}" for own in self._own.get(name, (name,))]
        return [tensor(*self.source((name, port)))]


def _input_of(body: Mapping[str, node_def_pb2.NodeDef], text: str) -> str:
    """``op:result:1``, as functions name tensors, as graphs do: ``op:3``."""
    name, *place = text.split(":")
    if not place:
        return text
    ports = 0
    for result in op_types.op_def(body[name].op).output_arg if name in body else ():
        if result.name == place[0]:
            break
        attributes = body[name].attr
        counts = attributes[result.number_attr].i if result.number_attr else 1
        ports += len(attributes[result.type_list_attr].list.type) if result.type_list_attr else counts
    return tensor(name, ports + int(place[1]))
