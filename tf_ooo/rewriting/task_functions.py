"""Makes the functions of compiled calls: one for all tasks that compute the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from grappler_passes.compat import op_types
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.node_input import data_inputs, split_input, tensor
from tf_ooo.compat import xla
from tf_ooo.rewriting import fused_ops
from tf_ooo.rewriting.task_calls import Chosen, TaskCall, is_copied

Port = tuple[str, int]
# Their inputs may come in either order, and the remapper sorts them by name, for each micro-batch otherwise.
COMMUTATIVE = frozenset({"Add", "AddV2", "Maximum", "Minimum", "Mul"})


@dataclass(frozen=True)
class CalledOps:
    """Holds what a call's function knows its ops by.

    Attributes:
        inner: names inside, by the names of the ops; constants that it has copies of are among them.
        inputs, outputs: tensors outside, in the order of the function's arguments and results.
        controls: ops outside that the call waits for.
    """

    inner: Mapping[str, str]
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    controls: Sequence[str]


@dataclass
class Functions:
    """The functions made so far, by what they compute."""

    graph_def: graph_pb2.GraphDef
    chosen: Chosen
    general: Mapping[str, str]
    made: dict[str, function_pb2.FunctionDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = {node.name: node for node in self.graph_def.node}

    def of(self, call: TaskCall) -> tuple[str, CalledOps]:
        """Return the name of a call's function, and what it knows the ops by."""
        names = self.chosen.index.names
        members = sorted((names[i] for i in call.ops), key=lambda name: (self.general.get(name, name), name))
        called = self._borders(call, members)
        arguments = {port: f"a{place}" for place, port in enumerate(called.inputs)}
        read = _reader(called.inner, arguments)
        constants = [name for name in called.inner if self._nodes[name].op == "Const"]
        body = [
            node
            for name in constants + members
            for node in inner_nodes(self._nodes[name], called.inner, read)
        ]
        infos = [self._info(port) for port in called.inputs]
        results = [f"{called.inner[name]}:{port}" for name, port in called.outputs]
        return self._named(call.key.kind, body, infos, list(arguments.values()), results), called

    def _borders(self, call: TaskCall, members: Sequence[str]) -> CalledOps:
        index, own = self.chosen.index, set(call.ops)
        inner = {name: f"n{place}" for place, name in enumerate(members)}
        inputs: dict[Port, None] = {}
        controls: dict[str, None] = {}
        for name in members:
            for text in self._nodes[name].input:
                producer, port = split_input(text)
                if producer in inner:
                    continue
                if is_copied(self._nodes[producer]):
                    if port == 0:
                        inner[producer] = f"c{len(inner) - len(members)}"
                elif port < 0:
                    controls[producer] = None
                else:
                    inputs[producer, port] = None
        outputs = {
            (index.names[i], port)
            for i in own
            for reader in index.succs[i]
            if reader not in own
            for producer, port in index.data_preds[reader]
            if producer == i
        }
        order = {name: place for place, name in enumerate(members)}
        return CalledOps(
            inner, tuple(inputs), sorted(outputs, key=lambda port: (order[port[0]], port[1])), tuple(controls)
        )

    def _info(self, port: Port) -> OutputInfo:
        return self.chosen.outputs[port[0]][port[1]]

    def _named(
        self,
        kind: str,
        body: Sequence[node_def_pb2.NodeDef],
        infos: Sequence[OutputInfo],
        arguments: Sequence[str],
        results: Sequence[str],
    ) -> str:
        """Return the name under which the function is, or is put now."""
        nodes = graph_pb2.GraphDef(versions=self.graph_def.versions, node=body)
        key = hashlib.sha256(nodes.SerializeToString(deterministic=True))
        key.update(repr(([(info.dtype, info.shape) for info in infos], results)).encode())
        # The same in each process: what was compiled once is found again, also by another fit.
        name = f"ooo_task_{kind}_{key.hexdigest()[:24]}"
        if name not in self.made:
            typed = [(arg, info.dtype, info.shape) for arg, info in zip(arguments, infos, strict=True)]
            self.made[name] = xla.compiled_function_def(name, nodes, typed, results)
        return name


def _reader(inner: Mapping[str, str], arguments: Mapping[Port, str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        producer, port = split_input(text)
        return tensor(inner[producer], port) if producer in inner else arguments[producer, port]

    return read


def inner_nodes(
    node: node_def_pb2.NodeDef, inner: Mapping[str, str], read: Callable[[str], str]
) -> list[node_def_pb2.NodeDef]:
    """Return an op as it is inside of its function: under another name, without marks and device.

    ``read``: what stands inside for a tensor.
    """
    own = node_def_pb2.NodeDef(name=inner[node.name], op=node.op)
    for name, value in node.attr.items():
        if not name.startswith("_"):
            own.attr[name].CopyFrom(value)
    given = [read(text) for text in data_inputs(node)]
    own.input.extend(sorted(given) if node.op in COMMUTATIVE else given)
    return fused_ops.parts_of(own) or [own]


def graph_input(body: Mapping[str, node_def_pb2.NodeDef], text: str) -> str:
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
