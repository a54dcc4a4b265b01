"""Gives each task its own copy of results from other tasks that XLA would compute within other kernels.

XLA returns a view as a copy of its data, and returns from a kernel of its own what it would never store, such
as the exponent of an activation.  A task that recomputes these from stored inputs needs neither the kernels
nor the memory; PyTorch's min-cut partitioner does this too.  Means are computed as divided sums, as XLA does:
a task that reads one can divide the sum itself.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import control_inputs, data_inputs, split_input, tensor
from grappler_passes.compat.shape_inference import InferredOutputs
from grappler_passes.errors import VerifyError
from tf_ooo.rewriting.task_calls import TaskKey
from tf_ooo.rewriting.task_functions import computed

# These ops rename their input; all else that they read is constant.
_VIEWS = frozenset({"ExpandDims", "Identity", "Reshape", "Squeeze"})
# An element of the result depends on one of each input: XLA computes these ops where they are read.
_ELEMENTWISE = frozenset({
    "Abs", "Add", "AddN", "AddV2", "Cast", "Div", "DivNoNan", "Equal", "Erf", "Erfc", "Exp", "Expm1",
    "Greater", "GreaterEqual", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr",
    "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "NotEqual", "Pow", "RealDiv", "Reciprocal", "Rsqrt",
    "Select", "SelectV2", "Sigmoid", "Sign", "Softplus", "Sqrt", "Square", "SquaredDifference", "Sub", "Tanh",
})  # fmt: skip
# No longer chain of these ops is computed again.
_MOST_STEPS = 16
_SUFFIX = "/tf_ooo_copy"

Place = tuple[TaskKey, str]  # a task and the device it is on
_SUM, _COUNT = "/tf_ooo_sum", "/tf_ooo_count"
# Sums of half types would be rounded before they are divided; means are not.
_EXACT = frozenset({"float32", "float64"})


@dataclass(frozen=True)
class OwnCopies:
    """Holds a step in which each task reads its own copies instead of another task's ops.

    ``copies`` maps each copy to the op that it copies; tasks and general names are for all ops.
    """

    graph_def: graph_pb2.GraphDef
    tasks: Mapping[str, TaskKey]
    general: Mapping[str, str]
    copies: Mapping[str, str]


def own_copies(
    before: graph_pb2.GraphDef,
    tasks: Mapping[str, TaskKey],
    general: Mapping[str, str],
    outputs: InferredOutputs,
) -> OwnCopies:
    """Return the step with the copies, and add their outputs to ``outputs``.

    ``tasks`` are by op; ``general`` is as in CompileTasksPass; ``outputs`` are those of all ops.
    """
    step = _Step(before, tasks, general, outputs)
    new = _Copies(step, graph_protos.copy_of(before))
    new.read_instead()
    outputs.add(new.copies)
    own = OwnCopies(new.graph_def, {**tasks, **new.tasks}, {**general, **new.general}, new.copies)
    _check(before, own)
    return own


@dataclass(frozen=True)
class Again:
    """Says which ops recompute a result, and which stored results or other tasks' results they read."""

    ops: Set[str]
    given: Set[str]


class _Step:
    """Finds which results of the original step may be computed again."""

    def __init__(
        self,
        graph_def: graph_pb2.GraphDef,
        tasks: Mapping[str, TaskKey],
        general: Mapping[str, str],
        outputs: InferredOutputs,
    ) -> None:
        self.nodes = {node.name: node for node in graph_def.node}
        self.general, self.outputs = general, outputs
        self.reads = {name: list(map(split_input, data_inputs(node))) for name, node in self.nodes.items()}
        self.place = {name: (tasks[name], node.device) for name, node in self.nodes.items() if name in tasks}
        self.views = {name for name in self.place if self._is_view(self.nodes[name])}
        self._elementwise = {name for name in self.place if self.nodes[name].op in _ELEMENTWISE}
        self._stored = self._all_stored()
        self._again: dict[tuple[str, int], Again | None] = {}
        self._bytes: dict[str, int] = {}

    def behind(self, name: str) -> tuple[str, list[str]]:
        """Return the op that a tensor is a view of, or its own op, and the views between."""
        views = []
        while name in self.views:
            views.append(name)
            name = self.reads[name][0][0]
        return name, views

    def again(self, name: str, steps: int = _MOST_STEPS) -> Again | None:
        """Return how to compute a result again; None if that is impossible, or takes more than ``steps``."""
        if (name, steps) not in self._again:
            self._again[name, steps] = self._found_again(name, steps)
        return self._again[name, steps]

    def _found_again(self, name: str, steps: int) -> Again | None:
        if not self._may_be_again(name) or not steps:
            return None
        ops, given = {name}, set[str]()
        for read, views in (self.behind(read) for read, _ in self.reads[name]):
            ops.update(views)
            if self._may_be_again(read) and self.place[read] == self.place[name]:
                further = self.again(read, steps - 1)
                if further is None:
                    return None
                ops |= further.ops
                given |= further.given
            elif self.nodes[read].op != "Const":
                given.add(read)
        return Again(ops, given)

    def _may_be_again(self, name: str) -> bool:
        return name in self._elementwise and name not in self._stored

    def bytes_of(self, name: str) -> int:
        """Return the bytes of an op's results in any micro-batch; unknown sizes count as one."""
        general = self.general.get(name, name)
        if general not in self._bytes:
            self._bytes[general] = sum(
                info.element_bytes * math.prod(size or 1 for size in info.shape or ())
                for info in self.outputs[name]
            )
        return self._bytes[general]

    def _is_view(self, node: node_def_pb2.NodeDef) -> bool:
        return node.op in _VIEWS and all(
            self.nodes[read].op == "Const" for read, _ in self.reads[node.name][1:]
        )

    def _all_stored(self) -> set[str]:
        """Return the results that are in memory anyway.

        They are read by a kernel of their own task that is not elementwise, by kernels of two other tasks, on
        another device, or outside of tasks.
        """
        # Numbers that are compared for equality must be the same numbers, not computed again.
        compared = {name for name in self._elementwise if self.nodes[name].op in ("Equal", "NotEqual")}
        stored, fused = set[str](), self.views | self._elementwise - compared
        read_by: dict[str, set[TaskKey]] = {}
        for name, node in self.nodes.items():
            key, _ = self.place.get(name, (None, ""))
            for read, _ in map(self.behind, {read for read, _ in self.reads[name]}):
                place = self.place.get(read)
                if place is None or key is None or place[1] != node.device:
                    stored.add(read)
                elif name not in fused:
                    read_by.setdefault(read, set()).add(key)
        for read, keys in read_by.items():
            if len(keys) > 1 or self.place[read][0] in keys:
                stored.add(read)
        return stored


class _Copies:
    """Makes the copies in a graph, and lets the ops of tasks read them."""

    def __init__(self, step: _Step, graph_def: graph_pb2.GraphDef) -> None:
        self._step, self.graph_def = step, graph_def
        self.copies: dict[str, str] = {}
        self._devices: dict[tuple[str, TaskKey], list[str]] = {}  # the devices of a task's copies of an op
        self.tasks: dict[str, TaskKey] = {}
        self.general: dict[str, str] = {}

    def read_instead(self) -> None:
        """Make all ops of tasks read their own copies."""
        readers: dict[Place, list[node_def_pb2.NodeDef]] = {}
        for node in list(self.graph_def.node):
            if node.name in self._step.place:
                readers.setdefault(self._step.place[node.name], []).append(node)
        for place, nodes in readers.items():
            copied = self._copied(place, nodes)
            for node in nodes:
                reads = self._step.reads[node.name]
                if not copied.isdisjoint(name for name, _ in reads):
                    node.input[:] = [self._own(*read, node, copied) for read in reads] + control_inputs(node)

    def _copied(self, place: Place, nodes: Iterable[node_def_pb2.NodeDef]) -> set[str]:
        """Return the other tasks' ops that a task copies: views, and ops whose copies take no more memory."""
        step = self._step
        reads = {name for node in nodes for name, _ in step.reads[node.name]}
        copied, given = set[str](), set[str]()
        for name, views in (step.behind(name) for name in reads if step.place.get(name) != place):
            copied.update(view for view in views if step.place[view] != place)
            given.add(name)
        for name in sorted(given, key=lambda name: (step.general.get(name, name), name)):
            again = step.again(name) if step.nodes[name].device == place[1] else None
            if again is not None and step.place[name] != place:
                more = sum(map(step.bytes_of, again.given - given))
                if more <= step.bytes_of(name):
                    copied |= again.ops
                    given |= again.given
        return copied

    def _own(self, name: str, port: int, reader: node_def_pb2.NodeDef, copied: set[str]) -> str:
        """Return the text of an input as the reader's task reads it."""
        step, place = self._step, self._step.place[reader.name]
        if name not in copied or step.place[name] == place:
            return tensor(name, port)
        key, device = place
        devices = self._devices.setdefault((name, key), [])
        if device not in devices:
            devices.append(device)
        number = devices.index(device)
        of_device = f"_device_{number}" if number else ""
        copy = f"{name}{_SUFFIX}/{key.of_all}_{key.microbatch}{of_device}"
        if copy not in self.copies:
            self.copies[copy], self.tasks[copy] = name, key
            self.general[copy] = f"{step.general.get(name, name)}{_SUFFIX}/{key.of_all}{of_device}"
            self.graph_def.node.append(self._copied_op(step.nodes[name], copy, reader, copied))
        return tensor(copy, port)

    def _copied_op(
        self, original: node_def_pb2.NodeDef, name: str, reader: node_def_pb2.NodeDef, copied: set[str]
    ) -> node_def_pb2.NodeDef:
        """Return a copy of an op with its reader's marks, since it belongs to the reader's task."""
        copy = computed(original)
        copy.name, copy.device = name, reader.device
        copy.input.extend(self._own(*read, reader, copied) for read in self._step.reads[original.name])
        copy.input.extend(_waits(original, reader.device))
        for mark in (mark for mark in reader.attr if mark.startswith("_ooo")):
            copy.attr[mark].CopyFrom(reader.attr[mark])
        return copy


def _waits(original: node_def_pb2.NodeDef, device: str) -> list[str]:
    """Return what a copy on a device waits for; elsewhere the tensor that it reads is enough."""
    return control_inputs(original) if original.device == device else []


def _check(before: graph_pb2.GraphDef, made: OwnCopies) -> None:
    """Raise VerifyError unless each op reads the same as before, seen through correct copies."""
    was = {node.name: node for node in before.node}
    if len(made.graph_def.node) != len(was) + len(made.copies):
        raise VerifyError("?", "new nodes", "there are others than copies")
    for node in made.graph_def.node:
        original = was[made.copies.get(node.name, node.name)]
        if node == original:
            continue
        if node.name in made.copies and node.op not in _VIEWS | _ELEMENTWISE:
            raise VerifyError(node.name, "new nodes", f"a {node.op} is computed again")
        read = [(made.copies.get(name, name), port) for name, port in map(split_input, data_inputs(node))]
        if read != list(map(split_input, data_inputs(original))):
            raise VerifyError(node.name, "data inputs", "reads other tensors")
        if control_inputs(node) != _waits(original, node.device):
            raise VerifyError(node.name, "waits", "waits for others")
        if computed(node) != computed(original):
            raise VerifyError(node.name, "attributes", f"is not what {original.name!r} is")


def divided_means(
    before: graph_pb2.GraphDef, names: Container[str], outputs: InferredOutputs
) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """Return the graph with these means as quotients, and the new sums' names with their means'.

    A mean stays as it is if its number of elements is unknown or its type is a half type.  ``outputs`` are
    those of all ops; the new ops' are added.
    """
    graph_def = graph_protos.copy_of(before)
    counts: dict[str, int] = {}
    for node in [node for node in graph_def.node if node.op == "Mean" and node.name in names]:
        count = _count(node, outputs)
        if count:
            counts[node.name] = count
            total, number = graph_def.node.add(), graph_def.node.add()
            total.CopyFrom(node)
            total.name, total.op = node.name + _SUM, "Sum"
            number.CopyFrom(_number(node, count))
            node.op, node.input[:] = "RealDiv", [total.name, number.name, *control_inputs(node)]
            del node.attr["Tidx"], node.attr["keep_dims"]
    sums = {name + _SUM: name for name in counts}
    outputs.add({**sums, **{name + _COUNT: name for name in counts}})
    _check_sums(before, graph_def, counts)
    return graph_def, sums


def _count(mean: node_def_pb2.NodeDef, outputs: InferredOutputs) -> int | None:
    """Return how many numbers a mean is taken over, if that is known and a quotient gives the same."""
    (read, port), axes = map(split_input, data_inputs(mean))
    info, places = outputs[read][port], outputs.constant(*axes)
    if info.dtype not in _EXACT or info.shape is None or places is None:
        return None
    sizes = [info.shape[place] for place in {int(place) % len(info.shape) for place in np.ravel(places)}]
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _number(mean: node_def_pb2.NodeDef, count: int) -> node_def_pb2.NodeDef:
    """Return the constant that a mean's sum is divided by."""
    number = node_def_pb2.NodeDef(name=mean.name + _COUNT, op="Const", device=mean.device)
    dtype = mean.attr["T"].type
    number.attr["dtype"].type = dtype
    number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(count, dtype))
    return number


def _check_sums(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, counts: dict[str, int]) -> None:
    """Raise VerifyError unless each mean is a quotient of its old input, and nothing else is new."""
    now = {node.name: node for node in after.node}
    for was in (node for node in before.node if node.name in counts):
        total, number = now[was.name + _SUM], now[was.name + _COUNT]
        quotient, mean = now[was.name], node_def_pb2.NodeDef()
        mean.CopyFrom(total)
        mean.name, mean.op = was.name, "Mean"
        reads = [total.name, number.name, *control_inputs(was)]
        divides = quotient.op == "RealDiv" and list(quotient.input) == reads
        if mean != was or not divides or number != _number(was, counts[was.name]):
            raise VerifyError(was.name, "attributes", "is not the quotient that its mean was")
    if len(now) != len(before.node) + 2 * len(counts):
        raise VerifyError("?", "new nodes", "there are others than sums and numbers of elements")
