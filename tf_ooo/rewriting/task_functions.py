"""Makes the functions of compiled calls: one for all tasks that compute the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from grappler_passes.compat.graph_protos import tensor
from tf_ooo.compat import xla_calls
from tf_ooo.rewriting import task_calls
from tf_ooo.rewriting.task_calls import Chosen, TaskCall

# A tensor is the number of the node that computes it, and its port.
Port = tuple[int, int]
# Inputs of these may come in any order; the remapper sorts them by name, which differs between micro-batches.
COMMUTATIVE = frozenset({"Add", "AddV2", "Maximum", "Minimum", "Mul"})


@dataclass(frozen=True)
class CalledOps:
    """Says how a call's function names its ops; ops are numbers of nodes in the graph without calls.

    Attributes:
        inner: names inside the function, by op, also of the constants that it has copies of.
        inputs, outputs: tensors outside, in the order of the function's arguments and results.
        controls: ops outside of the call that it waits for.
    """

    inner: Mapping[int, str]
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    controls: Sequence[int]


@dataclass
class Functions:
    """Holds the functions made so far, by what they compute."""

    chosen: Chosen
    general: Mapping[str, str]
    made: dict[str, function_pb2.FunctionDef] = field(default_factory=dict)

    def of(self, call: TaskCall) -> tuple[function_pb2.FunctionDef, CalledOps]:
        """Return a call's function, and its names of the ops."""
        called = self._borders(call)
        arguments = {port: f"a{place}" for place, port in enumerate(called.inputs)}
        body: list[node_def_pb2.NodeDef] = []
        for i, name in called.inner.items():
            ports = self.chosen.index.data_preds[i]
            given = [arguments.get(port) or tensor(called.inner[port[0]], port[1]) for port in ports]
            body += _inner_nodes(self.chosen.nodes[i], name, given)
        return self._function(call.key.kind, body, called), called

    def _borders(self, call: TaskCall) -> CalledOps:
        index, copied = self.chosen.index, self.chosen.copied
        members = sorted(call.ops, key=self._general_name)
        inner = {i: f"n{place}" for place, i in enumerate(members)}
        inputs: dict[Port, None] = {}
        controls: dict[int, None] = {}
        outputs: list[Port] = []
        for i in members:
            for port in index.data_preds[i]:
                if port[0] in copied:
                    inner.setdefault(port[0], f"c{len(inner) - len(members)}")
                elif port[0] not in inner:
                    inputs[port] = None
            controls.update((p, None) for p in index.control_preds[i] if p not in inner and p not in copied)
            readers = (reader for reader in index.succs[i] if reader not in inner)
            outputs += sorted(
                {port for reader in readers for port in index.data_preds[reader] if port[0] == i}
            )
        return CalledOps(inner, list(inputs), outputs, list(controls))

    def _general_name(self, i: int) -> tuple[str, str]:
        name = self.chosen.index.names[i]
        return self.general.get(name, name), name

    def _function(
        self, kind: str, body: Sequence[node_def_pb2.NodeDef], called: CalledOps
    ) -> function_pb2.FunctionDef:
        """Return the function that computes ``body``; its ops give the types of arguments and results."""
        results = [f"{called.inner[i]}:{port}" for i, port in called.outputs]
        key = hashlib.sha256(graph_pb2.GraphDef(node=body).SerializeToString(deterministic=True))
        key.update(repr(results).encode())
        # The name is the same in each process: what was compiled once is found again, also by another fit.
        name = f"ooo_task_{kind}_{key.hexdigest()[:24]}"
        if name not in self.made:
            given = [(f"a{place}", self._dtype(port)) for place, port in enumerate(called.inputs)]
            returned = list(zip(results, map(self._dtype, called.outputs), strict=True))
            self.made[name] = xla_calls.function_def(name, body, given, returned)
        return self.made[name]

    def _dtype(self, port: Port) -> str:
        return self.chosen.outputs[self.chosen.index.names[port[0]]][port[1]].dtype


def computed(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """Return only an op's type and attributes, without marks: what it computes from its inputs."""
    bare = node_def_pb2.NodeDef()
    bare.CopyFrom(node)
    for other in ("name", "device", "input", "experimental_debug_info", "experimental_type"):
        bare.ClearField(other)
    for attribute in [attribute for attribute in bare.attr if attribute[0] == "_"]:
        del bare.attr[attribute]
    return bare


def _inner_nodes(node: node_def_pb2.NodeDef, name: str, given: Sequence[str]) -> list[node_def_pb2.NodeDef]:
    """Return an op as it stands in its function, under another name."""
    own = computed(node)
    own.name = name
    own.input.extend(sorted(given) if node.op in COMMUTATIVE else given)
    return task_calls.parts_of(own) or [own]
