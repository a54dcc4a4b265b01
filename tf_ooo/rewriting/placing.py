"""Decides where a step's layers are, and gives every op its device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensorflow.core.framework import node_def_pb2, types_pb2

from grappler_passes.graph.dependencies import SWITCHES, GraphIndex, has_side_effects, only_reads, states_of
from tf_ooo.hosts.devices import host_device
from tf_ooo.planning.model.task import replica_of_part
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.rewriting.task_calls import slices_batch

_READ = "ReadVariableOp"


@dataclass(frozen=True)
class Homes:
    """Holds the full names of ``devices``: for each replica, those of its stages.

    ``holder_of_layer`` is the replica on whose device a layer's variables are kept and updated; the other
    replicas are sent the weights and send their gradients.
    """

    stage_of_layer: Sequence[int]
    devices: Sequence[Sequence[str]]
    holder_of_layer: Sequence[int]

    @property
    def replicas(self) -> int:
        return len(self.devices)

    def of_variables(self, layer: int) -> str:
        return self.devices[self.holder_of_layer[layer]][self.stage_of_layer[layer]]

    def device_of(self, layer: int, replica: int | None) -> str:
        """Return the device on which a layer runs for a replica; None: for ops that run once a step."""
        if replica is None:
            return self.of_variables(layer)
        return self.devices[replica][self.stage_of_layer[layer]]

    def replica_of_node(self, step: StepGraph) -> list[int | None]:
        """Return for each node the replica that its micro-batch passes through; None if it runs once."""
        of_part = replica_of_part(step.count, self.replicas)
        return [None if number is None or number >= step.count else of_part[number] for number in step.steps]


def one_pipeline(stage_of_layer: Sequence[int], device_of_stage: Sequence[str]) -> Homes:
    """Make the homes of a pipeline without replicas."""
    return Homes(stage_of_layer, (tuple(device_of_stage),), [0] * len(stage_of_layer))


def read_once(step: StepGraph, replica_of_node: Sequence[int | None]) -> dict[str, str]:
    """Return reads of variables and the ones that replace them: ``{read: the first of the same replica}``.

    If a variable is written only once, at the end of the step or of a turn, all micro-batches read the same:
    a replica whose devices do not hold it is sent it once.
    """
    index = step.index
    written: set[str] = set()
    for i, op in enumerate(index.ops):
        if replica_of_node[i] is not None and has_side_effects(op) and not only_reads(op):
            written |= states_of(index, i)
    firsts: dict[tuple[int, _Version], str] = {}
    stands_for: dict[str, str] = {}
    for i in sorted(index.order, key=step.turns.__getitem__):
        replica, version = replica_of_node[i], _version(step, i)
        if replica is None or version is None or index.names[version.variable] in written:
            continue
        if any(
            replica_of_node[before] is not None for before in version.waits_for
        ):  # it waits for its micro-batch
            continue
        first = firsts.setdefault((replica, version), index.names[i])
        if first != index.names[i]:
            stands_for[index.names[i]] = first
    return stands_for


def read_by_updates(step: StepGraph, homes: Homes) -> dict[str, str]:
    """Return reads of what updates on several devices read, and the first, which takes their place.

    An optimizer reads its learning rate for each weight: so a device is sent it once.
    """
    devices: dict[tuple[int, _Version], dict[str, str]] = {}
    for name, (_, layer, _) in step.where.items():
        i = step.index.index[name]
        if step.steps[i] == step.count and (version := _version(step, i)) is not None:
            devices.setdefault((step.turns[i], version), {})[name] = homes.of_variables(layer)
    shared = (list(reads) for reads in devices.values() if len(set(reads.values())) > 1)
    return {read: reads[0] for reads in shared for read in reads[1:]}


class _Version(NamedTuple):
    """Tells values of a variable apart, by number of its node: reads of the same one wait for the same."""

    variable: int
    dtype: int
    waits_for: frozenset[int]


def _version(step: StepGraph, i: int) -> _Version | None:
    """Return what an op reads; None for one that reads no variable, or runs in a loop or in a branch."""
    index, context = step.index, step.index.contexts[i]
    if index.ops[i] != _READ or context.frame or context.branches:
        return None
    handle = index.data_preds[i][0][0]
    if index.ops[handle] not in ("_Arg", "VarHandleOp"):
        return None
    dtype = int(step.graph_def.node[i].attr["dtype"].type)
    return _Version(handle, dtype, frozenset(index.control_preds[i]))


def reads_elsewhere(step: StepGraph, homes: Homes) -> bool:
    """Say whether a stage reads a variable on another device: a tied weight, or a layer cut between loops."""
    index, layer_of = step.index, {name: layer for name, (_, layer, _) in step.where.items()}
    for i in index.order:
        home = layer_of.get(index.names[i])
        if index.ops[i] != _READ or home is None:
            continue
        readers = {layer_of[index.names[s]] for s in index.succs[i] if index.names[s] in layer_of}
        if any(homes.of_variables(reader) != homes.of_variables(home) for reader in readers):
            return True
    return False


def is_resource(node: node_def_pb2.NodeDef) -> bool:
    """Return whether an op with one type hands on resources."""
    return "T" in node.attr and bool(node.attr["T"].type == types_pb2.DT_RESOURCE)


def crossing(step: StepGraph, replica_of_node: Sequence[int | None]) -> set[int]:
    """Return the ops that no lane orders: they lead from one replica's micro-batches to another's in turn.

    States that every micro-batch changes (seeds, moving averages, metrics) change in the order of
    micro-batches through all replicas.  Those that depend on no data (seeds) run ahead of all lanes; an op
    that reads data of another replica's micro-batch runs when these are there.
    """
    index = step.index
    nodes = enumerate(step.graph_def.node)
    batch = [i for i, node in nodes if node.op == "_Arg" and not is_resource(node)]
    fed = sum(1 << index.position[i] for i in batch)
    of_data = [bool(index.reach[i] & fed) for i in range(len(index))]
    out: set[int] = set()
    for turn in range(max(step.turns) + 1):
        of_turn = [i for i in range(len(index)) if step.turns[i] == turn]
        inside = sum(1 << index.position[i] for i in of_turn)
        bits: dict[int, int] = {}  # positions of each replica's ops that depend on data
        needed: dict[int, int] = {}  # what each replica's ops depend on
        own = {i: replica for i in of_turn if (replica := replica_of_node[i]) is not None}
        for i, replica in own.items():
            needed[replica] = needed.get(replica, 0) | index.reach[i]
            if of_data[i]:
                bits[replica] = bits.get(replica, 0) | 1 << index.position[i]
        others = {replica: (_of_others(bits, replica), _of_others(needed, replica)) for replica in needed}
        for i, replica in own.items():
            data, all_needed = others[replica]
            if index.reach[i] & inside & data if of_data[i] else all_needed >> index.position[i] & 1:
                out.add(i)
    return out


def _of_others(bits: Mapping[int, int], replica: int) -> int:
    return functools.reduce(operator.or_, (ops for each, ops in bits.items() if each != replica), 0)


_Nodes = Mapping[str, node_def_pb2.NodeDef]

_HANDS_ON = ("Identity", *SWITCHES, "Merge", "Enter", "Exit", "NextIteration")
_FREE = ("Const", "_Arg", "_Retval")
# tf.py_function and tf.numpy_function call code in the process that traced them.
_IN_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
# The training process has the rank; its workers have none.
_OF_RANK = "Horovod"


def place(
    step: StepGraph,
    homes: Homes,
    bytes_of: Mapping[str, int],
    replica_of_node: Sequence[int | None] | None = None,
) -> dict[str, str]:
    """Return ``{op: device}`` of all ops but constants, arguments and results.

    Ops on a variable are where it is, ops of a layer on its device; others follow the largest tensor
    (``bytes_of``) that they read, or else their readers.  Ops that call Python stay, and so do sums of all
    replicas' gradients, which are traced where the variable is.  ``replica_of_node`` None: one replica.
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
    """Move ops of Horovod from workers to this process, which sends and receives what they communicate."""
    of_rank = [name for name in placed if nodes[name].op.startswith(_OF_RANK)]
    home = host_device() if of_rank else ""
    process = home.rpartition("/device:")[0]
    return {**placed, **{name: home for name in of_rank if not placed[name].startswith(f"{process}/")}}


def as_they_can(nodes: _Nodes, placed: Mapping[str, str]) -> dict[str, str]:
    """Put ops that call Python, and ops that only CPUs have, where they can run."""
    python = {name: node.device for name, node in nodes.items() if node.op in _IN_PYTHON and node.device}
    able = {**placed, **python}
    for name, device in able.items():
        host, _, kind = device.rpartition("/device:")
        # TensorFlow has put it on a CPU though there was a GPU.
        if "/device:CPU:" in nodes[name].device and kind.startswith("GPU"):
            able[name] = f"{host}/device:CPU:0"
    return able


def on_variables(index: GraphIndex, nodes: _Nodes) -> dict[str, str]:
    """Return the devices of ops that are given a variable: the variable's own."""
    placed = {}
    handles = {
        i: nodes[name].device
        for i, name in enumerate(index.names)
        if index.ops[i] == "VarHandleOp" or index.ops[i] == "_Arg" and is_resource(nodes[name])
    }
    for i in index.order:
        name, takes = index.names[i], [p for p, _ in index.data_preds[i] if p in handles]
        if i not in handles and takes:
            placed[name] = handles[takes[0]]
            if index.ops[i] in _HANDS_ON and is_resource(nodes[name]):
                handles[i] = handles[takes[0]]
    return placed


def slices_at_home(index: GraphIndex, nodes: _Nodes, placed: dict[str, str]) -> None:
    """Cut micro-batches off where the batch is, so that no whole batch is sent."""
    for i, name in enumerate(index.names):
        if slices_batch(index, i):
            placed[name] = nodes[index.names[index.data_preds[i][0][0]]].device


def far_slices(
    step: StepGraph, homes: Homes, placed: Mapping[str, str], replica_of_node: Sequence[int | None]
) -> set[int]:
    """Return the slices of a batch that are cut off in another process than their task's.

    If ordered, each would need messages before its task: the task before says that it is done, and only then
    the rows are sent.  Unordered, all rows of a step are sent at its beginning.
    """
    index, far = step.index, set[int]()
    for name, (_, layer, _) in step.where.items():
        i = index.index[name]
        if slices_batch(index, i):
            own, there = placed.get(name, ""), homes.device_of(layer, replica_of_node[i])
            if own.rpartition("/device:")[0] != there.rpartition("/device:")[0]:
                far.add(i)
    return far


def follow(index: GraphIndex, nodes: _Nodes, placed: dict[str, str], bytes_of: Mapping[str, int]) -> None:
    """Put each remaining op where the largest tensor is that it reads, or else where a reader is."""

    def rest(order: Sequence[int]) -> list[int]:
        return [i for i in order if index.names[i] not in placed and index.ops[i] not in _FREE]

    for i in rest(index.order):
        if sources := [index.names[p] for p, _ in index.data_preds[i] if index.names[p] in placed]:
            placed[index.names[i]] = placed[max(sources, key=lambda name: bytes_of.get(name, 0))]
    for i in reversed(rest(index.order)):
        if readers := [index.names[s] for s in index.succs[i] if index.names[s] in placed]:
            placed[index.names[i]] = placed[readers[0]]
