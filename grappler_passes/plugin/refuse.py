"""A graph that may not run at all: it raises before any of its ops has an effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grappler_passes.compat import graph_protos, runtime
from grappler_passes.graph.node_input import split_input

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, tensor_pb2

NAME = "ooo_refused"


def refusing(graph_def: graph_pb2.GraphDef, message: str) -> graph_pb2.GraphDef:
    """A copy of the graph in which all work waits for an assertion that fails with ``message``.

    What only reads arguments is where work begins; everything else follows from it.
    """
    out = type(graph_def)()
    out.CopyFrom(graph_def)
    arguments = {node.name for node in out.node if node.op == "_Arg"}
    for node in out.node:
        if node.op not in ("_Arg", "_Retval") and all(
            split_input(text)[0] in arguments for text in node.input
        ):
            node.input.append(f"^{NAME}")
    device = runtime.host_device(out.node[0].device)
    _constant(out, f"{NAME}/condition", device, graph_protos.tensor_proto(False))
    _constant(out, f"{NAME}/message", device, graph_protos.tensor_proto(message))
    check = out.node.add(name=NAME, op="Assert", device=device)
    check.input.extend([f"{NAME}/condition", f"{NAME}/message"])
    check.attr["T"].list.type.append(graph_protos.tensor_proto("").dtype)
    return out


def _constant(graph_def: graph_pb2.GraphDef, name: str, device: str, value: tensor_pb2.TensorProto) -> None:
    node = graph_def.node.add(name=name, op="Const", device=device)
    node.attr["dtype"].type = value.dtype
    node.attr["value"].tensor.CopyFrom(value)
