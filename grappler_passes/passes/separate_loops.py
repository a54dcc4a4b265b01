"""Moves the sum of an RNN's weight gradients out of the loop that computes dO.

The loop computes, step by step, dO and ``total = total + dW(step)``, so that the layers below wait for dW of
all steps.  Ops that serve only such sums move to a second loop; the first loop stores in a list what they
read in each step.  The additions keep their order: no bit changes.  The price: a dO of each step stays alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

from grappler_passes.compat import shape_inference
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import ENTERS, EXITS, SWITCHES, GraphIndex, has_side_effects
from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from grappler_passes.passes.base import GraphEditor, Note, Pass, PassResult, Relaxation, tensor

_ADDS = ("Add", "AddV2", "AddN")


@dataclass(frozen=True)
class Accumulator:
    """Holds ``total = add(total, step)``: the nodes of the loop variable, which nobody else reads."""

    exit: int
    switch: int
    merge: int
    next_iteration: int
    add: int


@dataclass(frozen=True)
class Loop:
    """Holds one while frame: its nodes, Enters included, and each node's consumers within and outside."""

    frame: tuple[str, ...]
    members: frozenset[int]
    consumers: dict[int, set[int]]
    condition: int

    def exits(self, index: GraphIndex) -> list[int]:
        return [i for i in sorted(self.members) if index.ops[i] in EXITS and self.consumers[i]]


def find_loops(index: GraphIndex) -> Iterator[Loop]:
    """Yield all while loops, in the order of their frames' names."""
    frames: dict[tuple[str, ...], set[int]] = {}
    for i in range(len(index)):
        frame = index.arrival_frame(i) if index.ops[i] in ENTERS else index.contexts[i].frame
        if frame:
            frames.setdefault(frame, set()).add(i)
    merge_of = {source: merge for merge, sources in index.back_preds.items() for source in sources}
    for frame, members in sorted(frames.items()):
        conditions = [i for i in members if index.ops[i] == "LoopCond"]
        if len(conditions) != 1:
            continue
        consumers = {i: _consumers(index, i, merge_of) for i in members}
        yield Loop(frame, frozenset(members), consumers, conditions[0])


def _consumers(index: GraphIndex, i: int, merge_of: dict[int, int]) -> set[int]:
    # index.succs also holds the order of an Exit after its loop, along which no tensor flows.
    real = {
        s
        for s in index.succs[i]
        if i not in index.loop_preds.get(s, ())
        or i in index.control_preds[s]
        or any(p == i for p, _ in index.data_preds[s])
    }
    return real | ({merge_of[i]} if i in merge_of else set())


def accumulator_of(index: GraphIndex, loop: Loop, end: int) -> Accumulator | None:
    """Return the sum that leaves the loop at Exit ``end``; None if something else leaves there."""
    switch, port = index.data_preds[end][0]
    if index.ops[switch] not in SWITCHES or port != 0:
        return None
    merge = index.data_preds[switch][0][0]
    if len(index.back_preds.get(merge, ())) != 1 or loop.consumers[merge] != {switch}:
        return None
    following = index.back_preds[merge][0]
    add = index.data_preds[following][0][0]
    terms = index.data_preds[add]
    if index.ops[add] not in _ADDS or len(terms) < 2 or sum(term == (switch, 1) for term in terms) != 1:
        return None
    if loop.consumers[switch] != {end, add} or loop.consumers[add] != {following}:
        return None
    return Accumulator(end, switch, merge, following, add)


def only_for(index: GraphIndex, loop: Loop, ends: set[int]) -> set[int]:
    """Return the loop's nodes that serve nothing but the Exits ``ends``; loop variables count as a whole."""
    kept: set[int] = set()
    todo = list(ends)
    while todo:
        i = todo.pop()
        if i in kept or i not in loop.members or i == loop.condition or has_side_effects(index.ops[i]):
            continue
        kept.add(i)
        todo += [p for p, _ in index.data_preds[i]]
        todo += [*index.control_preds[i], *index.back_preds.get(i, ())]
    changed = True
    while changed:
        outside = {i for i in kept if i not in ends and not loop.consumers[i] <= kept}
        kept -= outside
        changed = bool(outside)
    return kept


def obstacle(index: GraphIndex, loop: Loop, sums: list[Accumulator], moved: set[int]) -> str:
    """Say why the sums cannot move to a loop of their own; empty if they can."""
    if len(loop.frame) > 1:
        return "the gradient loop is nested in another loop"
    if any(index.contexts[i].branches for i in loop.members if index.ops[i] in ENTERS):
        return "the gradient loop is in a branch of a conditional"
    if not all({s.exit, s.switch, s.merge, s.next_iteration, s.add} <= moved for s in sums):
        return "a weight gradient's sum is read by other ops of the loop"
    body = index.contexts[sums[0].add].branches
    if any(not index.contexts[i].branches <= body for i in moved - {s.exit for s in sums}):
        return "the weight gradient is computed in a conditional inside the loop"
    return ""


_FLOATS = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE)
_INT32, _VARIANT = types_pb2.DT_INT32, types_pb2.DT_VARIANT
# The first loop can hand over these types in a list.
_STORED = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")

Tensor = tuple[int, int]


@dataclass(frozen=True)
class SeparateLoopsPass(Pass):
    """Splits every gradient loop that can be split; notes each that stays mixed.

    Without a training graph every floating-point sum of a loop that pops stacks counts as a weight gradient.
    """

    name: ClassVar[str] = "separate_loops"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        index = GraphIndex(graph_def)
        if not index.back_preds:
            return PassResult(graph_def, False)
        editor = GraphEditor(graph_def)
        notes: list[Note] = []
        replaced: set[str] = set()
        outputs: dict[str, tuple[OutputInfo, ...]] = {}
        for loop in find_loops(index):
            sums = _weight_sums(index, editor, loop, training_graph)
            if not sums:
                continue
            moved = only_for(index, loop, {s.exit for s in sums})
            reason = obstacle(index, loop, sums, moved)
            if not reason:
                outputs = outputs or shape_inference.infer_outputs(graph_def)
                split = _LoopSplit(index, editor, loop, moved, outputs)
                reason = split.plan()
            ends = tuple(index.names[s.exit] for s in sums)
            if reason:
                notes.append(Note("mixed", reason, ends))
                continue
            split.apply()
            replaced |= {index.names[i] for i in moved}
            notes.append(Note("done", "the weight gradient's sum moved to a loop of its own", ends))
        return PassResult(editor.finish(), editor.modified, tuple(notes), frozenset(replaced))


def _weight_sums(
    index: GraphIndex, editor: GraphEditor, loop: Loop, training_graph: TrainingGraph | None
) -> list[Accumulator]:
    """Return the weight gradients summed in a loop that also computes something the rest waits for."""
    exits = loop.exits(index)
    sums = [
        s
        for s in (accumulator_of(index, loop, end) for end in exits)
        if s is not None and editor.nodes[index.names[s.merge]].attr["T"].type in _FLOATS
    ]
    if training_graph is not None:
        weight_grads = set(training_graph.of_kind(OpKind.WEIGHT_GRAD))
        sums = [s for s in sums if index.names[s.exit] in weight_grads]
    elif not any(index.ops[i] == "TensorListPopBack" for i in loop.members):
        return []
    return sums if len(sums) < len(exits) else []


class _LoopSplit:
    """Splits one loop in two, the second of which reads lists that the first stores.

    ``plan`` finds what crosses, ``apply`` edits.
    """

    def __init__(
        self,
        index: GraphIndex,
        editor: GraphEditor,
        loop: Loop,
        moved: set[int],
        outputs: dict[str, tuple[OutputInfo, ...]],
    ) -> None:
        self.index, self.editor, self.loop, self.moved, self.outputs = index, editor, loop, moved, outputs
        condition = editor.nodes[index.names[loop.condition]]
        self.device = condition.device
        self.prefix = f"{condition.name}/ooo_dW"
        self.frame = f"{loop.frame[0]}/ooo_dW"
        self.stored: dict[Tensor, int] = {}  # the tensors that a step hands over, with their dtypes
        self.invariant: dict[Tensor, str] = {}  # tensors that never change, and the tensor outside
        self.constants: set[int] = set()

    def plan(self) -> str:
        """Sort what the moved nodes read from the others; return the reason if something cannot cross."""
        for i in sorted(self.moved, key=lambda n: self.index.position[n]):
            if self.index.ops[i] in ENTERS:
                continue
            for source, port in self.index.data_preds[i]:
                known = source in self.moved or source == self.loop.condition
                if not known and (reason := self._crossing(source, port)):
                    return reason
        return "" if self.stored else "the weight gradient reads nothing of a step"

    def _crossing(self, source: int, port: int) -> str:
        index, name = self.index, self.index.names[source]
        if (outside := self._outside(source)) is not None:
            self.invariant[source, port] = outside
        elif index.ops[source] == "Const":
            self.constants.add(source)
        else:
            dtype = self.outputs[name][port].dtype
            if dtype not in _STORED:
                return f"the weight gradient reads a {dtype} of each step: {name}"
            if (
                index.contexts[source].branches - index.contexts[self.loop.condition].branches
                and len(index.contexts[source].branches) > 1
            ):
                return f"the weight gradient reads the result of a conditional in the loop: {name}"
            self.stored[source, port] = tf.as_dtype(dtype).as_datatype_enum
        return ""

    def _outside(self, source: int) -> str | None:
        """Return the tensor outside the loop that ``source`` hands on unchanged in every step."""
        index = self.index
        if index.ops[source] in SWITCHES:
            merge = index.data_preds[source][0][0]
            following = index.back_preds.get(merge, [])
            if len(following) != 1 or index.data_preds[following[0]][0] != (source, 1):
                return None
            source = index.data_preds[merge][0][0]
        elif source not in index.constant_enters:
            return None
        return tensor(index.names[index.data_preds[source][0][0]], index.data_preds[source][0][1])

    def apply(self) -> None:
        self._scalar("minus_one", -1)
        lists = {key: self._store(k, key, dtype) for k, (key, dtype) in enumerate(self.stored.items())}
        self._counter(next(iter(lists.values())))
        now: dict[Tensor, str] = {(self.loop.condition, 0): f"{self.prefix}/condition"}
        for k, (key, outside) in enumerate(self.invariant.items()):
            type_name = self.outputs[self.index.names[key[0]]][key[1]].dtype
            now[key] = self._enter(f"invariant_{k}", outside, tf.as_dtype(type_name).as_datatype_enum)
        for source in sorted(self.constants):
            now[source, 0] = self._clone(source)
        for k, (key, dtype) in enumerate(self.stored.items()):
            now[key] = self._load(k, key, lists[key], dtype)
        for i in self.moved:
            self._rewire(i, now)

    def _rewire(self, i: int, now: dict[Tensor, str]) -> None:
        name = self.index.names[i]
        node = self.editor.nodes[name]
        if self.index.ops[i] in ENTERS:
            node.attr["frame_name"].s = self.frame.encode()
            return

        def replace(producer: str, port: int) -> list[str]:
            source = self.index.index[producer]
            if source in self.moved:
                return [tensor(producer, port)]
            return [f"^{self.prefix}/step"] if port < 0 else [now[source, port]]

        self.editor.map_inputs(name, replace)

    def _add(self, suffix: str, op: str, *inputs: str, device: str | None = None, **types: int) -> str:
        where = self.device if device is None else device
        node = self.editor.add(f"{self.prefix}/{suffix}", op, inputs, where)
        for key, value in types.items():
            node.attr[key].type = value
        return f"{self.prefix}/{suffix}"

    def _scalar(self, suffix: str, value: int, *inputs: str) -> str:
        name = self._add(suffix, "Const", *inputs, dtype=_INT32)
        content = self.editor.nodes[name].attr["value"].tensor
        content.dtype = _INT32
        content.tensor_shape.SetInParent()
        content.int_val.append(value)
        return name

    def _enter(
        self, suffix: str, outside: str, dtype: int, frame: str | None = None, constant: bool = True
    ) -> str:
        """Add an Enter to ``frame``; None stands for the second loop's frame."""
        name = self._add(suffix, "Enter", outside, T=dtype)
        node = self.editor.nodes[name]
        node.attr["frame_name"].s = (frame or self.frame).encode()
        node.attr["is_constant"].b = constant
        other = next(i for i in self.loop.members if self.index.ops[i] in ENTERS)
        parallel = self.editor.nodes[self.index.names[other]].attr["parallel_iterations"].i
        node.attr["parallel_iterations"].i = parallel or 10
        return name

    def _variable(
        self, suffix: str, enter: str, condition: str, dtype: int
    ) -> tuple[str, node_def_pb2.NodeDef]:
        """Add Merge, Switch and NextIteration of a new loop variable; NextIteration still lacks its input."""
        following = f"{self.prefix}/{suffix}/next"
        merge = self._add(f"{suffix}/merge", "Merge", enter, following, T=dtype)
        self.editor.nodes[merge].attr["N"].i = 2
        switch = self._add(f"{suffix}/switch", "Switch", merge, condition, T=dtype)
        self._add(f"{suffix}/next", "NextIteration", T=dtype)
        return switch, self.editor.nodes[following]

    def _store(self, k: int, key: Tensor, dtype: int) -> str:
        """Collect one tensor of each step of the first loop; return the list, outside of the loop."""
        source, at = self.index.names[key[0]], f"store_{k}"
        device = self.editor.nodes[source].device
        limit = f"{self.prefix}/minus_one"
        types = {"element_dtype": dtype, "shape_type": _INT32}
        empty = self._add(f"{at}/empty", "EmptyTensorList", limit, limit, device=device, **types)
        enter = self._enter(f"{at}/enter", empty, _VARIANT, self.loop.frame[0], constant=False)
        condition = self.index.names[self.loop.condition]
        switch, following = self._variable(at, enter, condition, _VARIANT)
        given = f"{switch}:1", tensor(source, key[1])
        pushed = self._add(f"{at}/push", "TensorListPushBack", *given, device=device, element_dtype=dtype)
        following.input.append(pushed)
        return self._add(f"{at}/exit", "Exit", switch, T=_VARIANT)

    def _counter(self, stacked: str) -> None:
        """Make the second loop's frame, which runs as many steps as the lists are long."""
        length = self._add("length", "TensorListLength", stacked)
        limit = self._enter("limit", length, _INT32)
        start = self._enter("start", self._scalar("zero", 0), _INT32, constant=False)
        condition = f"{self.prefix}/condition"
        switch, following = self._variable("count", start, condition, _INT32)
        less = self._add("less", "Less", f"{self.prefix}/count/merge", limit, T=_INT32)
        self._add("condition", "LoopCond", less)
        step = self._add("step", "Identity", f"{switch}:1", T=_INT32)
        increment = self._scalar("one", 1, f"^{step}")
        following.input.append(self._add("add", "AddV2", step, increment, T=_INT32))
        self._scalar("any_shape", -1, f"^{step}")

    def _load(self, k: int, key: Tensor, stacked: str, dtype: int) -> str:
        entered = self._enter(f"load_{k}/list", stacked, _VARIANT)
        device = self.editor.nodes[self.index.names[key[0]]].device
        given = entered, f"{self.prefix}/step", f"{self.prefix}/any_shape"
        return self._add(f"load_{k}/get", "TensorListGetItem", *given, device=device, element_dtype=dtype)

    def _clone(self, source: int) -> str:
        old = self.editor.nodes[self.index.names[source]]
        name = self._add(f"const_{source}", "Const", f"^{self.prefix}/step", device=old.device)
        for key, value in old.attr.items():
            if key != "_class":
                self.editor.nodes[name].attr[key].CopyFrom(value)
        return name
