"""Calculates FLOP and bytes of TensorFlow's ops from op type and shapes, and seconds on a device's roofline.

Matrix products and convolutions have formulas, views cost nothing, and every other op counts as the bytes
that it reads and writes; an op with neither formula nor known shapes gets a reason instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from grappler_passes.compat import shape_inference
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import SWITCHES, split_input
from tf_ooo.costs.devices import ELEMENTS_A_PIECE, SPLIT_SUM, TILE, DeviceModel, Work, gemm_pieces
from tf_ooo.errors import CostError

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2

# These run no kernel that counts: no memory of their own, or a few bytes of shape, is read or written.
FREE_OPS = frozenset(
    {"Assert", "BroadcastArgs", "BroadcastGradientArgs", "Const", "ControlTrigger", "Enter", "Exit",
     "ExpandDims", "HostConst", "Identity", "IdentityN", "LoopCond", "Merge", "NextIteration", "NoOp",
     "Placeholder", "PlaceholderWithDefault", "PreventGradient", "Rank", "ReadVariableOp", "Reshape",
     "Shape", "ShapeN", "Size", "Squeeze", "StopGradient", *SWITCHES, "VarHandleOp", "VarIsInitializedOp",
     "_Arg", "_DeviceArg", "_DeviceRetval", "_Retval", "_VarHandlesOp"}
)  # fmt: skip
# The shapes of their inputs and outputs do not tell how long these ops take.
_NO_FORMULA = re.compile(
    r"(CudnnRNN|BlockLSTM|LSTMBlock|GRUBlock|PartitionedCall|StatefulPartitionedCall|StatelessWhile|While|If"
    r"|StatelessIf|Case|For|Xla|PyFunc|EagerPyFunc|MapDefun|RemoteCall|SymbolicGradient|Iterator|Optional"
    r"|Horovod|Collective|Nccl|Send|Recv|_Send|_Recv|_HostSend|_HostRecv|Barrier|Queue|Stack|TensorList"
    r"|TensorArray)"
)
# These ops read their first input this many times more: moments first, or a maximum and a sum first.
_EXTRA_READS = {
    "FusedBatchNorm": 1,
    "FusedBatchNormGrad": 2,
    "Softmax": 1,
    "LogSoftmax": 1,
    "SoftmaxCrossEntropyWithLogits": 1,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
}
# The sizes of their outputs may only be known at run time; they are never larger than the input.
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any")
# These ops read only as much of their first input as they put out.
_PARTIAL_READS = ("Gather", "ResourceGather", "Slice", "StridedSlice", "Split", "Unpack", "DynamicSlice")

# These ops put out at most as many rows as go in.
_NEVER_MORE_ROWS = frozenset({"Unique", "UniqueV2", "UnsortedSegmentSum"})
_RESERVED_PORT = 5

_Outputs = Mapping[str, Sequence[OutputInfo]]
# These prefixes and suffixes mark oneDNN, fusion and versions.
_BEFORE = re.compile(r"^(_Mkl(Native)?)?(_?Fused(?=Conv|MatMul|BatchMatMul|Depthwise))?")
_BEHIND = re.compile(r"(WithBias|V\d+|Ex)+$")


def base_type(op_type: str) -> str:
    """Return ``Conv2D`` for ``_MklNativeFusedConv2D``, ``FusedBatchNormGrad`` for versions such as V3."""
    return _BEHIND.sub("", _BEFORE.sub("", op_type))


@dataclass(frozen=True)
class AnalyticOps:
    """Holds work and seconds of a graph's ops; ``unknown`` says why other ops have none."""

    work: Mapping[str, Work]
    seconds: Mapping[str, float]
    unknown: Mapping[str, str] = field(default_factory=dict)


def analytic_ops(
    graph_def: graph_pb2.GraphDef, device: DeviceModel, outputs: _Outputs | None = None
) -> AnalyticOps:
    """Return the costs of each node of a flat graph; ``outputs`` None: what TensorFlow can infer."""
    outputs = shape_inference.infer_outputs(graph_def) if outputs is None else outputs
    outputs = with_largest_sizes(graph_def, outputs)
    works: dict[str, Work] = {}
    seconds: dict[str, float] = {}
    unknown: dict[str, str] = {}
    for node in graph_def.node:
        sources = [split_input(text) for text in node.input]
        infos = [(outputs.get(producer, ()), port) for producer, port in sources if port >= 0]
        inputs = [ports[port] if port < len(ports) else None for ports, port in infos]
        try:
            work = works[node.name] = op_work(node, inputs, outputs.get(node.name, ()))
            seconds[node.name] = 0.0 if node.op in FREE_OPS else device.seconds(work)
        except CostError as error:
            unknown[node.name] = str(error)
    return AnalyticOps(works, seconds, unknown)


def op_work(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    """Return the work of an op; unknown inputs are None. CostError names the op if its work is unknown."""
    if node.op in FREE_OPS:
        return Work(pieces=1)
    if _NO_FORMULA.match(node.op):
        raise CostError(f"op {node.name!r} ({node.op}): there is no formula for what it takes")
    try:
        return _RULES.get(base_type(node.op), _by_bytes)(_Op(node, inputs, outputs))
    except (_UnknownShapeError, IndexError) as error:
        raise CostError(f"op {node.name!r} ({node.op}): {error or 'an input is missing'}") from error


class _UnknownShapeError(Exception):
    """A size that the costs depend on is unknown."""


@dataclass(frozen=True)
class _Op:
    """Holds an op, its inputs and outputs; a tensor's place is its input's number, or ``_RESULT``."""

    node: node_def_pb2.NodeDef
    inputs: Sequence[OutputInfo | None]
    outputs: Sequence[OutputInfo]

    def dims(self, place: int) -> tuple[int, ...]:
        return _dims(self.outputs[0] if place == _RESULT else self.inputs[place])

    @property
    def moved_bytes(self) -> float:
        return _tensor_bytes(self.inputs) + _tensor_bytes(self.outputs[:1])


_Rule = Callable[[_Op], Work]
_RESULT = -1


def _dims(info: OutputInfo | None) -> tuple[int, ...]:
    if info is None or info.shape is None or None in info.shape:
        raise _UnknownShapeError(f"the shape {info.shape if info else None} of a tensor is not fully known")
    return info.shape  # type: ignore[return-value]


def _tensor_bytes(infos: Sequence[OutputInfo | None]) -> float:
    """Return the bytes of the tensors; handles and strings count as nothing."""
    numbers = [info for info in infos if info is None or info.is_number]
    return float(sum(math.prod(_dims(info)) * (info.element_bytes if info else 0) for info in numbers))


def _by_bytes(op: _Op) -> Work:
    """Count only memory traffic: inputs are read once, outputs written once, variables read and written."""
    kind, inputs, outputs = base_type(op.node.op), op.inputs, op.outputs
    if kind in _REDUCTIONS:  # axes are a few numbers, perhaps of unknown count
        inputs = inputs[:1]
        outputs = [*outputs] if is_closed(outputs[0]) else [info for info in inputs if info]
    moved = written = _tensor_bytes(outputs)
    if kind in _PARTIAL_READS:
        moved += written
    else:
        moved += _tensor_bytes(inputs) + _variable_bytes(op.node, inputs)
        if kind in _EXTRA_READS:
            moved += _EXTRA_READS[kind] * _tensor_bytes(inputs[:1])
    element_bytes = max((info.element_bytes for info in (*outputs, *inputs) if info), default=4) or 4
    return Work(0.0, moved, max(1.0, moved / element_bytes / ELEMENTS_A_PIECE))


def _variable_bytes(node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None]) -> float:
    """Return the bytes moved behind handles: each variable is as large as the op's largest value."""
    handles = sum(info is not None and info.dtype == "resource" for info in inputs)
    values = [info for info in inputs if handles and info is not None and info.is_number]
    passes = 1 if node.op == "AssignVariableOp" else 2
    return passes * handles * max((_tensor_bytes([info]) for info in values), default=0.0)


def _matmul(op: _Op) -> Work:
    left, out = op.dims(0), op.dims(_RESULT)
    attrs = op.node.attr
    transposed = any(name in attrs and attrs[name].b for name in ("transpose_a", "adj_x"))
    summed = left[-2] if transposed else left[-1]
    flop = 2.0 * math.prod(out) * summed
    return Work(flop, op.moved_bytes, gemm_pieces(out[-2], out[-1], summed, math.prod(out[:-2])))


# The kernel and the tensor on the output's side are at these places in a convolution and its gradients.
_KERNEL_AND_OUTER = {"F": (1, _RESULT), "dO": (1, 2), "dW": (_RESULT, 2)}


def _conv(kind: str) -> _Rule:
    def rule(op: _Op) -> Work:
        kernel, outer = (op.dims(place) for place in _KERNEL_AND_OUTER[kind])
        rows, pixels = math.prod(kernel[:-1]), math.prod(outer) / kernel[-1]
        product = (pixels, kernel[-1], rows) if kind == "F" else (rows, kernel[-1], pixels)
        if kind == "dO":
            inner = math.prod(op.dims(_RESULT)) / kernel[-2]
            product = inner, kernel[-2], math.prod(kernel[:-2]) * kernel[-1]
        return Work(2.0 * math.prod(outer) * rows, op.moved_bytes, gemm_pieces(*product))

    return rule


def _depthwise(kind: str) -> _Rule:
    def rule(op: _Op) -> Work:
        kernel, outer = (op.dims(place) for place in _KERNEL_AND_OUTER[kind])
        out = math.prod(outer)
        return Work(2.0 * out * math.prod(kernel[:-2]), op.moved_bytes, max(1.0, out / ELEMENTS_A_PIECE))

    return rule


def _einsum(op: _Op) -> Work:
    """Count two flop for each combination of the indices; an ellipsis stands for its hidden indices."""
    left, _, right = op.node.attr["equation"].s.decode().replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, info in zip(left.split(","), op.inputs, strict=False):
        dims = _dims(info)
        before, dots, after = term.partition("...")
        hidden = len(dims) - len(before) - len(after) if dots else 0
        labels = [*before, *(f".{hidden - i}" for i in range(hidden)), *after]
        for label, dim in zip(labels, dims, strict=True):
            sizes[label] = max(sizes.get(label, 1), dim)
    out = math.prod(op.dims(_RESULT))
    summed = math.prod(size for label, size in sizes.items() if label not in right and label[0] != ".")
    flop = 2.0 * math.prod(sizes.values()) if len(op.inputs) > 1 else 0.0
    return Work(flop, op.moved_bytes, max(1.0, out / TILE**2) * max(1.0, summed // SPLIT_SUM))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "SparseMatMul"), _matmul),
    **dict.fromkeys(("Einsum", "XlaEinsum"), _einsum),
    **dict.fromkeys(("Conv2D", "Conv3D", "Conv"), _conv("F")),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInput"), _conv("dO")),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilter"), _conv("dW")),
    "DepthwiseConv2dNative": _depthwise("F"),
    "DepthwiseConv2dNativeBackpropInput": _depthwise("dO"),
    "DepthwiseConv2dNativeBackpropFilter": _depthwise("dW"),
}


def with_largest_sizes(graph_def: graph_pb2.GraphDef, outputs: _Outputs) -> dict[str, tuple[OutputInfo, ...]]:
    """Return unknown sizes as large as they can be; those that follow from an open input stay open.

    Only a run tells these sizes: rows that a batch looks up (``Unique``), all that an optimizer computes from
    them, and what cuDNN reserves for a batch normalization.
    """
    largest = {name: tuple(infos) for name, infos in outputs.items()}
    open_nodes = [node for node in graph_def.node if not all(map(is_closed, largest.get(node.name, ())))]
    bounded: set[tuple[str, int]] = set()
    changed = True
    while changed:  # nodes come in any order, and there may be loops
        changed = False
        for node in open_nodes:
            for port, info in list(_closed_now(node, largest, bounded)):
                infos = largest[node.name]
                largest[node.name] = (*infos[:port], info, *infos[port + 1 :])
                bounded.add((node.name, port))
                changed = True
    return largest


def _closed_now(
    node: node_def_pb2.NodeDef, outputs: _Outputs, bounded: set[tuple[str, int]]
) -> Iterator[tuple[int, OutputInfo]]:
    """Yield outputs of the node whose sizes were open and can be told by now."""
    sources = [split_input(text) for text in node.input]
    usable = sources[:1] if node.op in _NEVER_MORE_ROWS else [s for s in sources if s in bounded]
    for port, info in enumerate(outputs[node.name]):
        if is_closed(info):
            continue
        if node.op == "FusedBatchNormV3" and port == _RESERVED_PORT:
            yield port, replace(info, shape=(0,))
            continue
        for name, source_port in usable:
            infos = outputs.get(name, ())
            filled = _filled(info, infos[source_port]) if 0 <= source_port < len(infos) else None
            if filled is not None:
                yield port, filled
                break


def _filled(info: OutputInfo, source: OutputInfo) -> OutputInfo | None:
    """Fill open sizes of ``info`` from ``source``; None if these are open too, or the ranks differ."""
    own = source.shape if info.shape is None else info.shape
    if not is_closed(source) or own is None or len(own) != len(source.shape or ()):
        return None
    sizes = zip(own, source.shape or (), strict=True)
    return replace(info, shape=tuple(theirs if size is None else size for size, theirs in sizes))


def is_closed(info: OutputInfo) -> bool:
    """Return whether all sizes are known."""
    return info.shape is not None and None not in info.shape
