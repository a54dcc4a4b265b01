"""The device of every op, given the devices of layers and of variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorflow.core.framework import node_def_pb2

from grappler_passes.graph.contexts import SWITCHES
from grappler_passes.graph.dependencies import GraphIndex
from tf_ooo.hosts.devices import host_device
from tf_ooo.rewriting.homes import Homes, is_resource
from tf_ooo.rewriting.step_graph import StepGraph

_Nodes = Mapping[str, node_def_pb2.NodeDef]

_SLICES = ("Slice", "StridedSlice")
_HANDS_ON = ("Identity", *SWITCHES, "Merge", "Enter", "Exit", "NextIteration")
_FREE = ("Const", "_Arg", "_Retval")
# tf.py_function and tf.numpy_function: what they call is in the process that traced them.
_IN_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
# The training process is the rank, its workers are none.
_OF_RANK = "Horovod"


def place(
    step: StepGraph,
    homes: Homes,
    bytes_of: Mapping[str, int],
    replica_of_node: Sequence[int | None] | None = None,
) -> dict[str, str]:
    """``{op: device}`` of all ops but constants, arguments and results.

    Ops on a variable are where it is, ops of a layer on its device; others follow the largest tensor
    (``bytes_of``) that they read, or else whoever reads them.  Those that call Python stay, and what adds up
    the gradients of all replicas, which is traced where the variable is.  ``replica_of_node`` None: there is
    one.
    """
    index = step.index
    replica_of = [0] * len(index) if replica_of_node is None else replica_of_node
    nodes = {node.name: node for node in step.graph_def.node}
    placed = on_variables(index, nodes)
    for name, (_, layer, _) in step.where.items():
        if nodes[name].op not in _FREE:
            placed.setdefault(name, homes.device_of(layer, replica_of[index.index[name]]))
    for name in step.sums - step.where.keys():
        if replica_of[index.index[name]] is None:
            placed.setdefault(name, nodes[name].device)
    slices_at_home(index, nodes, placed)
    follow(index, nodes, placed, bytes_of)
    return with_rank(nodes, as_they_can(nodes, placed))


def with_rank(nodes: _Nodes, placed: Mapping[str, str]) -> dict[str, str]:
    """The same devices, but for ops of Horovod on a worker: what they communicate is sent to this process."""
    of_rank = [name for name in placed if nodes[name].op.startswith(_OF_RANK)]
    if not of_rank:
        return dict(placed)
    home = host_device()
    process = home.rpartition("/device:")[0]
    return {**placed, **{name: home for name in of_rank if not placed[name].startswith(f"{process}/")}}


def as_they_can(nodes: _Nodes, placed: Mapping[str, str]) -> dict[str, str]:
    """Return the same devices, but for ops that call Python, and those that only CPUs have."""
    python = {name: node.device for name, node in nodes.items() if node.op in _IN_PYTHON and node.device}
    return {name: _able(nodes[name].device, device) for name, device in {**placed, **python}.items()}


def _able(now: str, device: str) -> str:
    """The device, or the CPU beside it for an op that TensorFlow has put on a CPU though there was a GPU."""
    host, _, kind = device.rpartition("/device:")
    on_cpu = "/device:CPU:" in now and kind.startswith("GPU")
    return f"{host}/device:CPU:0" if on_cpu else device


def on_variables(index: GraphIndex, nodes: _Nodes) -> dict[str, str]:
    """Ops that are given a variable are where it is."""
    placed = {}
    handles = {
        i: nodes[name].device
        for i, name in enumerate(index.names)
        if index.ops[i] == "VarHandleOp" or index.ops[i] == "_Arg" and is_resource(nodes[name])
    }
    for i in index.order:
        name = index.names[i]
        if i in handles:
            continue
        takes = [p for p, _ in index.data_preds[i] if p in handles]
        if not takes:
            continue
        placed[name] = handles[takes[0]]
        if index.ops[i] in _HANDS_ON and is_resource(nodes[name]):
            handles[i] = handles[takes[0]]
    return placed


def slices_at_home(index: GraphIndex, nodes: _Nodes, placed: dict[str, str]) -> None:
    """A micro-batch is cut off where the batch is, so that no whole batch is sent."""
    for i, name in enumerate(index.names):
        if index.ops[i] in _SLICES and index.data_preds[i]:
            source = index.data_preds[i][0][0]
            if index.ops[source] == "_Arg":
                placed[name] = nodes[index.names[source]].device


def follow(index: GraphIndex, nodes: _Nodes, placed: dict[str, str], bytes_of: Mapping[str, int]) -> None:
    """Others follow the largest tensor that they read, or else whoever reads them."""

    def rest(order: Sequence[int]) -> list[int]:
        return [i for i in order if index.names[i] not in placed and index.ops[i] not in _FREE]

    for i in rest(index.order):
        sources = [index.names[p] for p, _ in index.data_preds[i]]
        sources = [name for name in sources if name in placed]
        if sources:
            placed[index.names[i]] = placed[max(sources, key=lambda name: bytes_of.get(name, 0))]
    for i in reversed(rest(index.order)):
        readers = [index.names[s] for s in index.succs[i] if index.names[s] in placed]
        if readers:
            placed[index.names[i]] = placed[readers[0]]
