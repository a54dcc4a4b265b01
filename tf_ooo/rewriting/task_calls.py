"""Chooses which ops of a placed step become compiled calls: the ops of a task that XLA supports, together.

No path leaves an interval of a topological order and comes back, and intervals that do not overlap can become
single nodes without closing a cycle.  So this makes an order in which the ops of each task stand together as
far as the graph allows, and turns each run of one task into a call.  XLA knows only the parts of what
TensorFlow's remapper has fused, and fuses by itself: such ops are taken apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import data_inputs
from grappler_passes.compat.shape_inference import InferredOutputs
from grappler_passes.graph.dependencies import Context, GraphIndex, has_side_effects
from tf_ooo.compat import xla_calls

# A single op is launched by itself as fast as in a call.
LEAST_OPS = 2
# XLA may have to know small constants, shapes and axes, when it compiles.
_MOST_CONSTANT_BYTES = 64 * 1024
# Each of these tasks becomes a call, even if it has only one op.
_WHOLE = ("F", "dO")
_ENDS = frozenset({"_Arg", "_Retval", "NoOp", "Const", "Placeholder"})
_SLICES = frozenset({"Slice", "StridedSlice"})

TaskT = TypeVar("TaskT", bound=Hashable)

STATE = "variables and other state"
RANDOM = "random numbers"
NO_KERNEL = "XLA has no such op"
NO_NUMBERS = "strings and handles"
OPEN_SHAPES = "sizes that are known only when the step runs"
IN_LOOPS = "loops and conditions"
ALONE = "single ops between calls"
REFUSED = "tasks that XLA cannot compile"
# A fused op begins with this op, which takes this many of its inputs.
_FIRST = {"_FusedMatMul": ("MatMul", 2), "_FusedConv2D": ("Conv2D", 2)}
_UNARY = "_UnaryOpsComposition"
_BIAS = "BiasAdd"
_ACTIVATIONS = frozenset({"Relu", "Relu6", "Elu", "Tanh", "Sigmoid", "LeakyRelu"})


@dataclass(frozen=True)
class TaskKey:
    """Says whose ops a call holds; ``layer`` is None unless each layer has its own call."""

    kind: str
    stage: int
    microbatch: int
    layer: int | None = None

    @property
    def of_all(self) -> str:
        """Return the text that a task shares with the same task of the other micro-batches."""
        return f"{self.kind}_stage_{self.stage}" + ("" if self.layer is None else f"_layer_{self.layer}")


@dataclass(frozen=True)
class TaskCall:
    """Holds the ops of a call by their number in the graph, in topological order."""

    key: TaskKey
    device: str
    ops: tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """Holds the calls of a step; ``left`` counts ops of tasks that stay single, by reason and type.

    ``copied`` are constants of which each call has its own.
    """

    nodes: Sequence[node_def_pb2.NodeDef]
    index: GraphIndex
    outputs: InferredOutputs
    copied: Set[int]
    calls: Sequence[TaskCall]
    left: Mapping[tuple[str, str], int]


def choose(
    graph_def: graph_pb2.GraphDef,
    tasks: Mapping[str, TaskKey],
    general: Mapping[str, str],
    outputs: InferredOutputs,
) -> Chosen:
    """Return the calls of a placed and ordered step.

    ``tasks`` are ops' tasks by name; ``general`` are names that ops of all micro-batches share; ``outputs``
    are those of all ops.
    """
    nodes = list(graph_def.node)  # a list, since protobuf wraps a node anew at each look
    index = GraphIndex(graph_def)
    copied = {i for i, node in enumerate(nodes) if is_copied(node)}
    left: Counter[tuple[str, str]] = Counter()
    task_of: list[tuple[TaskKey, str] | None] = [None] * len(index)
    reasons: dict[tuple[str, str, int, str], str] = {}
    for i, node in enumerate(nodes):
        name, op = index.names[i], index.ops[i]
        key = tasks.get(name)
        if key is None or op in _ENDS or slices_batch(index, i):
            continue
        # Micro-batches differ at most in sizes, which may be known in one and not in another: XLA then
        # compiles the task once for each size.
        kind = general.get(name, name), op, node.attr["T"].type if "T" in node.attr else 0, node.device
        if kind not in reasons:
            reasons[kind] = _why_not(index, i, node, outputs)
        reason = IN_LOOPS if index.contexts[i] != Context() else reasons[kind]
        if reason:
            left[reason, op] += 1
        else:
            task_of[i] = key, node.device
    for i, task in _joins_inside(index, task_of):
        if task is not None and task[1] == nodes[i].device:
            task_of[i] = task
    calls, whole = [], Counter(task for task in task_of if task is not None)
    for (key, device), ops in runs(index, task_of, copied):
        alone = len(ops) < LEAST_OPS and (key.kind not in _WHOLE or len(ops) < whole[key, device])
        if alone and not _reads_what_waits(index, ops, copied):
            left.update((ALONE, index.ops[i]) for i in ops)
        else:
            calls.append(TaskCall(key, device, tuple(ops)))
    return Chosen(nodes, index, outputs, copied, calls, left)


def _joins_inside(index: GraphIndex, task_of: Sequence[TaskT | None]) -> Iterator[tuple[int, TaskT | None]]:
    """Yield each NoOp that orders ops of only one task, and the task, which it would divide."""
    for i, op in enumerate(index.ops):
        if op == "NoOp" and index.control_preds[i] and index.succs[i]:
            around = {task_of[j] for j in (*index.control_preds[i], *index.succs[i])}
            if len(around) == 1:
                yield i, around.pop()


def _reads_what_waits(index: GraphIndex, ops: Sequence[int], copied: Set[int]) -> bool:
    """Return whether ops read a constant that waits for others: only a copy of it may run earlier."""
    return any(index.control_preds[p] for i in ops for p in index.preds(i) if p in copied)


def is_copied(node: node_def_pb2.NodeDef) -> bool:
    """Return whether a constant is copied into each call."""
    return bool(node.op == "Const" and node.attr["value"].ByteSize() <= _MOST_CONSTANT_BYTES)


def slices_batch(index: GraphIndex, i: int) -> bool:
    """Return whether an op cuts a micro-batch out of the batch: all else is the same in each task."""
    return index.ops[i] in _SLICES and index.ops[index.data_preds[i][0][0]] == "_Arg"


def _why_not(index: GraphIndex, i: int, node: node_def_pb2.NodeDef, outputs: InferredOutputs) -> str:
    """Say why XLA cannot compile an op; empty if it can."""
    if "Random" in node.op:
        return RANDOM
    if has_side_effects(node.op):
        return STATE
    infos = [*outputs[node.name], *(outputs[index.names[p]][port] for p, port in index.data_preds[i])]
    if not all(info.is_number for info in infos):
        return NO_NUMBERS
    device_type = node.device.rpartition("device:")[2].partition(":")[0] or "CPU"
    kinds = parts_of(node) or [node]
    if not all(xla_calls.can_compile(part, device_type) for part in kinds):
        return NO_KERNEL
    if any(info.shape is None or None in info.shape for info in infos):
        return OPEN_SHAPES
    return ""


def runs(
    index: GraphIndex, task_of: Sequence[TaskT | None], copied: Set[int]
) -> list[tuple[TaskT, list[int]]]:
    """Return runs of nodes of one task in a topological order that keeps tasks together if possible.

    ``task_of`` is each node's task, None for none.  Edges from ``copied`` nodes into tasks do not count.
    """
    return _Runs(index, task_of, copied).all()


class _Runs(Generic[TaskT]):
    """Makes the order: next comes a task that waits for no other task's ops, if there is one."""

    def __init__(self, index: GraphIndex, task_of: Sequence[TaskT | None], copied: Set[int]) -> None:
        self._index, self._task_of, self._copied = index, task_of, copied
        self._waiting = [0] * len(index)
        self._missing: Counter[TaskT] = Counter()  # edges into a task from other ops not yet in order
        self._outside: list[int] = []
        self._ready: dict[TaskT, list[int]] = {}
        self._members: dict[TaskT, list[int]] = {}
        self._done = [False] * len(index)
        for i, task in enumerate(task_of):
            if task is not None:
                self._members.setdefault(task, []).append(i)
        for i in range(len(index)):
            for successor in index.succs[i]:
                if self._counts(i, successor):
                    self._waiting[successor] += 1
                    self._count_missing(i, successor, 1)
        for i, count in enumerate(self._waiting):
            if not count:
                self._put(i)

    def _counts(self, i: int, successor: int) -> bool:
        return i not in self._copied or self._task_of[successor] is None

    def _count_missing(self, i: int, successor: int, change: int) -> None:
        task = self._task_of[successor]
        if task is not None and task != self._task_of[i]:
            self._missing[task] += change

    def _put(self, i: int) -> None:
        task = self._task_of[i]
        (self._outside if task is None else self._ready.setdefault(task, [])).append(i)

    def all(self) -> list[tuple[TaskT, list[int]]]:
        in_order = []
        while self._outside or self._ready:
            while self._outside:
                self._emit(self._outside.pop())
            if self._ready:
                task = self._next()
                in_order.append((task, self._drained(task)))
        return in_order

    def _drained(self, task: TaskT) -> list[int]:
        run = self._ready[task]
        for i in run:  # grows while it is read
            self._emit(i)
        del self._ready[task]
        return run

    def _emit(self, i: int) -> None:
        self._done[i] = True
        for successor in self._index.succs[i]:
            if not self._counts(i, successor):
                continue
            self._waiting[successor] -= 1
            self._count_missing(i, successor, -1)
            if not self._waiting[successor]:
                self._put(successor)

    def _next(self) -> TaskT:
        """Return a task that misses nothing; else one that only misses what comes after its own ops."""
        for task in self._ready:
            if not self._missing[task]:
                return task
        tasks = sorted(self._ready, key=lambda task: self._missing[task])
        return next(filter(self._waits_for_itself, tasks), tasks[0])

    def _waits_for_itself(self, task: TaskT) -> bool:
        index = self._index
        own = [i for i in self._members[task] if not self._done[i]]
        bits = sum(1 << index.position[i] for i in own)
        missing = {p for i in own for p in index.preds(i) if not self._done[p] and self._task_of[p] != task}
        return all(index.reach[p] & bits for p in missing if p not in self._copied)


def keys_of(
    where: Mapping[str, tuple[str, int, int]], stage_of_layer: Sequence[int], fused: bool
) -> dict[str, TaskKey]:
    """Return the key of the call that each op is in.

    ``where`` is (kind, layer, micro-batch) of ops.  With ``fused`` a dW is in the call of its dO; without it
    each layer's dW is a call, so that its readers need not wait for other layers.
    """

    def key(kind: str, layer: int, microbatch: int) -> TaskKey:
        kind = "dO" if fused and kind == "dW" else kind
        own = layer if kind == "dW" else None
        return TaskKey(kind, stage_of_layer[layer], 0 if kind == "U" else microbatch, own)

    return {name: key(*at) for name, at in where.items()}


def parts_of(node: node_def_pb2.NodeDef, given: Sequence[str] | None = None) -> list[node_def_pb2.NodeDef]:
    """Return the ops that a fused one stands for, the last under its name; none for other ops.

    ``given`` are its data inputs under other names.  An op with unknown parts is not taken apart.
    """
    names = [name.decode() for name in node.attr["fused_ops"].list.s] if "fused_ops" in node.attr else []
    if node.op == _UNARY:
        first, names, count = "", [name.decode() for name in node.attr["op_names"].list.s], 1
    elif node.op in _FIRST and _ACTIVATIONS.issuperset(set(names) - {_BIAS}):
        first, count = _FIRST[node.op]
    else:
        return []
    inputs = list(data_inputs(node) if given is None else given)
    current, extra = inputs[:count], inputs[count:]
    parts: list[node_def_pb2.NodeDef] = []
    for place, op in enumerate([first, *names] if first else names):
        reads = [*current, extra.pop(0)] if op == _BIAS else current
        last = place == len(names) - (0 if first else 1)
        parts.append(_part(node, op, node.name if last else f"{node.name}/part_{place}", reads))
        current = [parts[-1].name]
    return parts


def _part(node: node_def_pb2.NodeDef, op: str, name: str, inputs: Sequence[str]) -> node_def_pb2.NodeDef:
    part = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
    for attribute in graph_protos.op_def(op).attr:
        own = "leakyrelu_alpha" if (op, attribute.name) == ("LeakyRelu", "alpha") else attribute.name
        value = node.attr.get(own, attribute.default_value)
        part.attr[attribute.name].CopyFrom(value)
    return part
