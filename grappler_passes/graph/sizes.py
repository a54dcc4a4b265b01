"""Computes the bytes of tensors and lists whose shapes the graph leaves open, from the step's inputs.

The sizes serve only to count memory: classification and passes see the graph as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_shape_pb2, types_pb2

from grappler_passes.compat import graph_protos, shape_inference
from grappler_passes.compat.graph_protos import data_inputs, make_identity, split_input
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import ENTERS, EXITS, MERGES, NEXT_ITERATIONS, SWITCHES, GraphIndex
from grappler_passes.graph.training_graph import TrainingGraph

_PASSING_ON = ("Identity", *ENTERS, *SWITCHES, *NEXT_ITERATIONS)


def has_loops(graph_def: graph_pb2.GraphDef) -> bool:
    """Return whether the graph has a loop."""
    return any(node.op in NEXT_ITERATIONS for node in graph_def.node)


def iterations_of_ops(graph_def: graph_pb2.GraphDef) -> dict[str, int]:
    """Return how often ops in loops run at most, by op name; ops of unknown count are left out."""
    if not has_loops(graph_def):
        return {}
    loops, index = Loops(graph_def), GraphIndex(graph_def)
    frames = [context.frame for context in index.contexts]
    of_frame: dict[str, int] = {}
    for name, op, frame in zip(index.names, index.ops, frames, strict=True):
        is_new = frame and op in MERGES and frame[-1] not in of_frame
        if is_new and (count := loops.iterations(name)) is not None:
            of_frame[frame[-1]] = count
    return {
        name: math.prod(map(of_frame.__getitem__, frame))
        for name, frame in zip(index.names, frames, strict=True)
        if frame and of_frame.keys() >= {*frame}
    }


class Loops:
    """Finds what goes around each loop of a flat graph, and the loop's condition."""

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.nodes: Mapping[str, node_def_pb2.NodeDef] = {node.name: node for node in graph_def.node}

    def data(self, name: str) -> list[str]:
        """Return the data inputs of an op, as text."""
        return data_inputs(self.nodes[name])

    def source(self, text: str) -> str:
        """Return the op whose result comes through this input; a loop's variable comes from its Merge."""
        name = split_input(text)[0]
        while self.nodes[name].op in _PASSING_ON:
            name = split_input(self.data(name)[0])[0]
        return name

    def entering(self, merge: str) -> list[str]:
        """Return the values with which a loop's variable enters."""
        return [text for text in self.data(merge) if self.nodes[split_input(text)[0]].op in ENTERS]

    def iterations(self, merge: str) -> int | None:
        """Return how often a variable's loop runs at most, if the limit of its counter is known."""
        condition = self._conditions.get(merge)
        return None if condition is None else min(self._limits(condition), default=None)

    @cached_property
    def _conditions(self) -> dict[str, str]:
        """Map what a Switch passes on, such as a loop's Merge, to the source of its condition."""
        deciding = (node for node in self.nodes.values() if node.op in SWITCHES)
        return {split_input(node.input[0])[0]: split_input(self.data(node.name)[1])[0] for node in deciding}

    def _limits(self, condition: str) -> list[int]:
        node = self.nodes[condition]
        if node.op in ("LoopCond", "LogicalAnd", "Identity"):
            return [limit for text in self.data(condition) for limit in self._limits(split_input(text)[0])]
        if node.op != "Less":
            return []
        counter, limit = self.data(condition)[:2]
        begin, end = self._number(counter), self._number(limit)
        return [] if begin is None or end is None else [max(0, end - begin)]

    def _number(self, text: str) -> int | None:
        """Return a constant: a loop variable's first value, or behind a loop its number of iterations."""
        name = self.source(text)
        while self.nodes[name].op in MERGES:
            if not (entering := self.entering(name)):
                return None
            name = self.source(entering[0])
        node = self.nodes[name]
        if node.op in EXITS:  # gradients run as often as their loop has counted
            return self.iterations(self.source(self.data(name)[0]))
        if node.op != "Const":
            return None
        value = tf.make_ndarray(node.attr["value"].tensor)
        return int(value) if np.issubdtype(value.dtype, np.integer) and value.size == 1 else None


_LOG = logging.getLogger("tf_ooo")
# These ops wait for the next batch.
ITERATORS = frozenset(
    {"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional", "OptionalGetValue",
     "MultiDeviceIteratorGetNextFromShard"}
)  # fmt: skip
# The bytes of a list depend on how often a loop runs, which the graph does not say.
_LISTS = frozenset({"TensorListReserve", "EmptyTensorList"})
# These ops give axes of their inputs, which are shapes; how many follows from the values.
_AXES = frozenset({"BroadcastGradientArgs"})

_NESTED_CONDITIONALS = 8

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class KnownShapes:
    """Holds what the caller knows of the shapes of a step's inputs.

    ``batch_size`` fills an open leading dimension and takes precedence over ``seen``. ``seen`` holds
    (TensorFlow's dtype number, shape) of tensors that the step was given.
    """

    batch_size: int | None = None
    seen: tuple[tuple[int, Shape], ...] = ()

    def __bool__(self) -> bool:
        return self.batch_size is not None or bool(self.seen)

    def fill(self, dtype: int, shape: Shape | None) -> Shape | None:
        """Return the shape with open dimensions filled from the largest of the tensors seen that fit it."""
        if shape and shape[0] is None and self.batch_size is not None:
            shape = (self.batch_size, *shape[1:])
        fitting = [seen for number, seen in self.seen if number == dtype and _fits(shape, seen)]
        if shape is None:
            return max(fitting, key=lambda s: math.prod(d or 0 for d in s), default=None)
        if not fitting:
            return shape
        columns = zip(*fitting, strict=True)
        largest = [max((d for d in column if d is not None), default=None) for column in columns]
        return tuple(d if d is not None else big for d, big in zip(shape, largest, strict=True))


def _fits(shape: Shape | None, seen: Shape) -> bool:
    if shape is None:
        return True
    return len(shape) == len(seen) and all(a is None or a == b for a, b in zip(shape, seen, strict=True))


def with_sizes(
    training_graph: TrainingGraph, graph_def: graph_pb2.GraphDef, known: KnownShapes, only_open: bool = False
) -> TrainingGraph:
    """Return the training graph with ``output_bytes`` filled where ``known`` tells them.

    Shapes that contradict ``known`` tell nothing. With ``only_open`` sizes that are already there stay.
    """
    try:
        outputs = outputs_with_sizes(graph_def, known)
    except Exception as error:  # TensorFlow's shape functions raise whatever they like
        _LOG.debug("the shapes of the inputs do not fit the graph: %s", error)
        return with_sizes(training_graph, graph_def, KnownShapes(), only_open) if known else training_graph
    ops = dict(training_graph.ops)
    for name, op in ops.items():
        if op.output_bytes is None or not only_open:
            ops[name] = replace(op, output_bytes=output_bytes(op.type, outputs.get(name, ())))
    for node in graph_def.node:
        if node.op in _AXES and node.name in ops and ops[node.name].output_bytes is None:
            # This is an upper bound: each output names some axes of the larger shape that the op is given.
            shapes = [outputs[name][port] for name, port in map(split_input, data_inputs(node))]
            ops[node.name] = replace(ops[node.name], output_bytes=output_bytes("", shapes))
    return replace(training_graph, ops=ops)


def output_bytes(op_type: str, outputs: Iterable[OutputInfo]) -> int | None:
    """Return the bytes of all outputs of an op; None if they are not known."""
    if op_type in _LISTS:
        return None
    total = 0
    for output in outputs:
        if not output.element_bytes:  # handles, variants and strings have none
            continue
        if output.shape is None or None in output.shape:
            return None
        total += math.prod(d for d in output.shape if d is not None) * output.element_bytes
    return total


def outputs_with_sizes(
    graph_def: graph_pb2.GraphDef, known: KnownShapes
) -> Mapping[str, tuple[OutputInfo, ...]]:
    """Return a flat graph's output shapes with open dimensions filled, for conditionals the largest.

    Raises what TensorFlow's shape functions raise if ``known`` contradicts the graph.
    """
    filled = _filled(graph_def, known)
    for _ in range(_NESTED_CONDITIONALS):
        outputs = shape_inference.infer_some_outputs(filled)
        branches = [(node, _largest_branch(node, outputs)) for node in filled.node]
        chosen = [(node, branch) for node, branch in branches if branch is not None]
        for merge, branch in chosen:
            make_identity(merge, [branch])
        if not chosen:
            break
    return outputs


def _largest_branch(node: node_def_pb2.NodeDef, outputs: Mapping[str, tuple[OutputInfo, ...]]) -> str | None:
    """Return the largest input of a Merge of unknown size; None for others, or if an input is unknown."""
    if node.op not in MERGES or output_bytes(node.op, outputs[node.name][:1]) is not None:
        return None
    ends = {text: split_input(text) for text in data_inputs(node)}
    sizes = {text: output_bytes("", outputs[name][port : port + 1]) for text, (name, port) in ends.items()}
    return None if None in sizes.values() else max(sizes, key=lambda text: sizes[text] or 0)


def _filled(graph_def: graph_pb2.GraphDef, known: KnownShapes) -> graph_pb2.GraphDef:
    """Return a copy for shape inference, with inputs of known size and loops as if they ran once."""
    out = graph_protos.copy_of(graph_def)
    iterations = {node.name for node in out.node if node.op in NEXT_ITERATIONS}
    second_outputs = {text[:-2] for node in out.node for text in node.input if text.endswith(":1")}
    for node in out.node:
        if node.op in ITERATORS:
            _fill_list(node.attr["output_types"].list.type, node.attr["output_shapes"].list.shape, known)
        elif node.op == "_Arg" and "_output_shapes" in node.attr:
            _fill_list([node.attr["T"].type], node.attr["_output_shapes"].list.shape, known)
        elif node.op in ENTERS:  # its shape function says nothing, nor does that of a loop's Merge
            make_identity(node, list(node.input))
        elif node.op in MERGES and node.name not in second_outputs:
            entering = [text for text in node.input if split_input(text)[0] not in iterations]
            if len(entering) < len(node.input):
                make_identity(node, entering)
    return out


def _fill_list(
    dtypes: Sequence[int], shapes: Sequence[tensor_shape_pb2.TensorShapeProto], known: KnownShapes
) -> None:
    for dtype, proto in zip(dtypes, shapes, strict=True):
        dims = None if proto.unknown_rank else tuple(d.size if d.size >= 0 else None for d in proto.dim)
        if (filled := known.fill(dtype, dims)) is not None:
            proto.Clear()
            for size in filled:
                proto.dim.add(size=-1 if size is None else size)


# Computes the bytes of the lists that while loops fill, one element per iteration. A recurrent layer keeps
# tensors for its backward pass in such lists; the graph only says how one element looks and how often the
# loop runs.

# The number says which input of the op is the element that it adds to a list.
_ADDED = {"TensorListPushBack": 1, "TensorListSetItem": 2}
_TAKING_OFF = "TensorListPopBack"
_EMPTY = ("EmptyTensorList", "TensorListReserve")
# A gradient's loop has intermediate values, and loops begin with zeros: measured peaks of two recurrent
# models were up to 1.3 of what was predicted from lists alone.
_BESIDE = 1.3


def with_list_sizes(training_graph: TrainingGraph, graph_def: graph_pb2.GraphDef) -> TrainingGraph:
    """Return the training graph with the bytes of loops' lists, at the Merge that each goes through.

    A list that is made empty then has no bytes of its own.  The bytes are None if an element's size or the
    number of iterations is not known before the loop runs.
    """
    lists = _Lists(training_graph, Loops(graph_def))
    sizes: dict[str, int | None] = {}
    for name in lists.merges:
        sizes[name] = lists.bytes_of(name)
        if sizes[name] is not None:
            sizes |= dict.fromkeys(lists.made_for(name), 0)
    ops = {name: replace(training_graph.ops[name], output_bytes=size) for name, size in sizes.items()}
    return replace(training_graph, ops={**training_graph.ops, **ops}) if ops else training_graph


class _Lists:
    """Finds the lists that go around the loops of a flat graph."""

    def __init__(self, training_graph: TrainingGraph, loops: Loops) -> None:
        self._graph, self._loops = training_graph, loops

    @cached_property
    def merges(self) -> list[str]:
        """Return the Merge nodes through which lists enter each iteration."""
        return [
            name
            for name, node in self._loops.nodes.items()
            if node.op in MERGES and node.attr["T"].type == types_pb2.DT_VARIANT and name in self._graph.ops
        ]

    def bytes_of(self, merge: str) -> int | None:
        """Estimate the bytes of all elements that the loop adds, with _BESIDE on top; None if unknown."""
        added = self._added(merge)
        if added is None:
            return None
        if added == "":
            return 0  # the list is handed on as it is
        element = self._graph.ops[added].output_bytes if added in self._graph.ops else None
        iterations = self._loops.iterations(merge)
        return None if element is None or iterations is None else math.ceil(_BESIDE * element * iterations)

    def made_for(self, merge: str) -> list[str]:
        """Return the empty list with which this variable enters its loop, if there is one."""
        sources = map(self._loops.source, self._loops.entering(merge))
        return [name for name in sources if self._loops.nodes[name].op in _EMPTY and name in self._graph.ops]

    def _added(self, merge: str) -> str | None:
        """Return the op whose result an iteration adds to the list; ``""`` for nothing, None if unknown."""
        loops = self._loops
        for text in loops.data(merge):
            if loops.nodes[split_input(text)[0]].op not in NEXT_ITERATIONS:
                continue
            name = loops.source(text)
            if name == merge:
                return ""
            op, read = loops.nodes[name].op, loops.data(name)
            own = (op in _ADDED or op == _TAKING_OFF) and loops.source(read[0]) == merge
            if not own:
                return None
            return "" if op == _TAKING_OFF else split_input(read[_ADDED[op]])[0]
        return None
