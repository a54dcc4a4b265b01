"""Bytes of tensors whose shape the graph leaves open, from what is known of the step's inputs.

Only for counting memory: classification and passes see the graph as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_shape_pb2

from grappler_passes.compat import graph_protos, shape_inference
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.contexts import ENTERS, MERGES, NEXT_ITERATIONS
from grappler_passes.graph.node_input import make_identity, split_input
from grappler_passes.graph.training_graph import TrainingGraph

_LOG = logging.getLogger("tf_ooo")
# These ops wait for the next batch.
ITERATORS = frozenset(
    {"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional", "OptionalGetValue",
     "MultiDeviceIteratorGetNextFromShard"}
)  # fmt: skip
# The bytes of a list depend on how often a loop runs, which the graph does not say.
_LISTS = frozenset({"TensorListReserve", "EmptyTensorList"})
# They give axes of their inputs, which are shapes; how many follows from the values.
_AXES = frozenset({"BroadcastGradientArgs"})

_NESTED_CONDITIONALS = 8

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class KnownShapes:
    """Holds what the caller knows of the shapes of a step's inputs.

    ``batch_size``: rows where the leading dimension is open; goes before ``seen``, (TensorFlow's number of
    the dtype, shape) of tensors that the step was given.
    """

    batch_size: int | None = None
    seen: tuple[tuple[int, Shape], ...] = ()

    def __bool__(self) -> bool:
        return self.batch_size is not None or bool(self.seen)

    def fill(self, dtype: int, shape: Shape | None) -> Shape | None:
        """Return the shape with its open dimensions filled: with the largest of the tensors that fit it."""
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
    """The training graph with ``output_bytes`` wherever ``known`` tells them; shapes that contradict it tell
    nothing.

    ``only_open``: sizes that are there already are right (they were not filled in for other inputs).
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
            ops[node.name] = replace(ops[node.name], output_bytes=_bytes_of_axes(node, outputs))
    return replace(training_graph, ops=ops)


def _bytes_of_axes(node: node_def_pb2.NodeDef, outputs: Mapping[str, tuple[OutputInfo, ...]]) -> int | None:
    """Return the most bytes: each output names some axes of the larger shape that it is given."""
    ends = [split_input(text) for text in node.input if not text.startswith("^")]
    return output_bytes("", [outputs[name][port] for name, port in ends])


def output_bytes(op_type: str, outputs: Iterable[OutputInfo]) -> int | None:
    """Return bytes of all outputs of an op, None where that is not known."""
    if op_type in _LISTS:
        return None
    total = 0
    for output in outputs:
        if not output.element_bytes:  # handles, variants, strings
            continue
        if output.shape is None or None in output.shape:
            return None
        total += math.prod(d for d in output.shape if d is not None) * output.element_bytes
    return total


def outputs_with_sizes(
    graph_def: graph_pb2.GraphDef, known: KnownShapes
) -> Mapping[str, tuple[OutputInfo, ...]]:
    """Shapes of all outputs of a flat graph, open dimensions filled; of a conditional the largest branch's.

    Raises what TensorFlow's shape functions raise where ``known`` contradicts the graph.
    """
    filled = _filled(graph_def, known)
    for _ in range(_NESTED_CONDITIONALS):
        outputs = shape_inference.infer_some_outputs(filled)
        merges = [node for node in filled.node if _is_open_merge(node, outputs)]
        if not merges:
            break
        for merge in merges:
            _take_largest(merge, outputs)
    return outputs


def _is_open_merge(node: node_def_pb2.NodeDef, outputs: Mapping[str, tuple[OutputInfo, ...]]) -> bool:
    """Return a Merge of unknown size with branches of known sizes."""
    if node.op not in MERGES or output_bytes(node.op, outputs[node.name][:1]) is not None:
        return False
    return None not in _branch_bytes(node, outputs).values()


def _branch_bytes(
    merge: node_def_pb2.NodeDef, outputs: Mapping[str, tuple[OutputInfo, ...]]
) -> dict[str, int | None]:
    ends = {text: split_input(text) for text in merge.input if not text.startswith("^")}
    return {text: output_bytes("", outputs[name][port : port + 1]) for text, (name, port) in ends.items()}


def _take_largest(merge: node_def_pb2.NodeDef, outputs: Mapping[str, tuple[OutputInfo, ...]]) -> None:
    sizes = _branch_bytes(merge, outputs)
    make_identity(merge, [max(sizes, key=lambda text: sizes[text] or 0)])


def _filled(graph_def: graph_pb2.GraphDef, known: KnownShapes) -> graph_pb2.GraphDef:
    """Return a copy for shape inference: inputs of known size, loops as if they ran once."""
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
        filled = known.fill(dtype, dims)
        if filled is not None:
            proto.Clear()
            for size in filled:
                proto.dim.add(size=-1 if size is None else size)
