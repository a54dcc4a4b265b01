"""FLOP and bytes of TensorFlow's ops, from op type and shapes; seconds on a device's roofline.

Matrix products and convolutions, with their gradients and fused forms, have formulas; views cost
nothing; every other op counts as the bytes that it reads and writes.  What has neither a formula nor
known shapes gets no number but a reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from grappler_passes.compat import shape_inference
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import split_input
from tf_ooo.costs.devices import ELEMENTS_A_PIECE, SPLIT_SUM, TILE, DeviceModel, Work, gemm_pieces
from tf_ooo.costs.open_sizes import is_closed, with_largest_sizes
from tf_ooo.errors import CostError

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2

# No kernel worth a number: no memory of its own is read or written, or only a few bytes of shape.
FREE_OPS = frozenset(
    {"Assert", "BroadcastArgs", "BroadcastGradientArgs", "Const", "ControlTrigger", "Enter", "Exit",
     "ExpandDims", "HostConst", "Identity", "IdentityN", "LoopCond", "Merge", "NextIteration", "NoOp",
     "Placeholder", "PlaceholderWithDefault", "PreventGradient", "Rank", "ReadVariableOp", "Reshape",
     "Shape", "ShapeN", "Size", "Squeeze", "StopGradient", "Switch", "VarHandleOp", "VarIsInitializedOp",
     "_Arg", "_DeviceArg", "_DeviceRetval", "_Retval", "_VarHandlesOp"}
)  # fmt: skip
# What they take is not to be told from the shapes of inputs and outputs.
_NO_FORMULA = re.compile(
    r"(CudnnRNN|BlockLSTM|LSTMBlock|GRUBlock|PartitionedCall|StatefulPartitionedCall|StatelessWhile|While|If"
    r"|StatelessIf|Case|For|Xla|PyFunc|EagerPyFunc|MapDefun|RemoteCall|SymbolicGradient|Iterator|Optional"
    r"|Horovod|Collective|Nccl|Send|Recv|_Send|_Recv|_HostSend|_HostRecv|Barrier|Queue|Stack|TensorList"
    r"|TensorArray)"
)
# How often the first input is read beyond once: moments first, or a maximum and a sum first.
_EXTRA_READS = {
    "FusedBatchNorm": 1,
    "FusedBatchNormGrad": 2,
    "Softmax": 1,
    "LogSoftmax": 1,
    "SoftmaxCrossEntropyWithLogits": 1,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
}
# The sizes of what they put out may be known only at run time; it is never more than what they read.
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any")
# They touch only as much of their first input as they put out.
_PARTIAL_READS = ("Gather", "ResourceGather", "Slice", "StridedSlice", "Split", "Unpack", "DynamicSlice")

_MKL = re.compile(r"^_Mkl(Native)?")
_FUSED = re.compile(r"^_?Fused(?=Conv|MatMul|BatchMatMul|Depthwise)")
_SUFFIX = re.compile(r"(WithBias|V\d+|Ex)+$")


def base_type(op_type: str) -> str:
    """The op type without the marks of oneDNN, of fusion and of versions: ``Conv2D`` of
    ``_MklNativeFusedConv2D``, ``FusedBatchNormGrad`` of ``FusedBatchNormGradV3``."""
    return _SUFFIX.sub("", _FUSED.sub("", _MKL.sub("", op_type)))


@dataclass(frozen=True)
class AnalyticOps:
    """Work and seconds of the ops of a graph; ``unknown`` says why others have none."""

    work: Mapping[str, Work]
    seconds: Mapping[str, float]
    unknown: Mapping[str, str] = field(default_factory=dict)


def analytic_ops(
    graph_def: graph_pb2.GraphDef,
    device: DeviceModel,
    outputs: Mapping[str, Sequence[OutputInfo]] | None = None,
) -> AnalyticOps:
    """Costs of each node of a flat graph; ``outputs`` None: what TensorFlow can infer of them."""
    outputs = with_largest_sizes(
        graph_def, shape_inference.infer_outputs(graph_def) if outputs is None else outputs
    )
    works: dict[str, Work] = {}
    unknown: dict[str, str] = {}
    for node in graph_def.node:
        try:
            works[node.name] = op_work(node, _inputs_of(node, outputs), outputs.get(node.name, ()))
        except CostError as error:
            unknown[node.name] = str(error)
    free = {node.name for node in graph_def.node if node.op in FREE_OPS}
    seconds = {name: 0.0 if name in free else device.seconds(work) for name, work in works.items()}
    return AnalyticOps(works, seconds, unknown)


def op_work(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    """What one op does, None: an input of which nothing is known.  CostError names it where that is open."""
    if node.op in FREE_OPS:
        return Work(pieces=1)
    if _NO_FORMULA.match(node.op):
        raise CostError(f"op {node.name!r} ({node.op}): there is no formula for what it takes")
    rule = _RULES.get(base_type(node.op), _by_bytes)
    try:
        return rule(node, inputs, outputs)
    except (_UnknownShapeError, IndexError) as error:
        raise CostError(f"op {node.name!r} ({node.op}): {error or 'an input is missing'}") from error


class _UnknownShapeError(Exception):
    """A size that the costs depend on is open."""


def _inputs_of(
    node: node_def_pb2.NodeDef, outputs: Mapping[str, Sequence[OutputInfo]]
) -> list[OutputInfo | None]:
    inputs: list[OutputInfo | None] = []
    for text in node.input:
        producer, port = split_input(text)
        if port >= 0:
            infos = outputs.get(producer, ())
            inputs.append(infos[port] if port < len(infos) else None)
    return inputs


def _dims(info: OutputInfo | None) -> tuple[int, ...]:
    if info is None or info.shape is None or None in info.shape:
        raise _UnknownShapeError(f"the shape {info.shape if info else None} of a tensor is not fully known")
    return info.shape  # type: ignore[return-value]


def _elements(info: OutputInfo | None) -> int:
    return math.prod(_dims(info))


def _tensor_bytes(infos: Sequence[OutputInfo | None]) -> float:
    """Bytes of the tensors among them: handles and strings count nothing."""
    numbers = [info for info in infos if info is None or info.is_number]
    return float(sum(_elements(info) * (info.element_bytes if info else 0) for info in numbers))


_Rule = Callable[["node_def_pb2.NodeDef", Sequence["OutputInfo | None"], Sequence[OutputInfo]], Work]


def _by_bytes(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    """Memory traffic only: inputs read once, outputs written once, variables read and written."""
    kind = base_type(node.op)
    if kind in _REDUCTIONS:  # the axes are a few numbers, of which even the count may be open
        inputs = inputs[:1]
        outputs = [*outputs] if is_closed(outputs[0]) else [info for info in inputs if info]
    written = _tensor_bytes(outputs)
    if kind in _PARTIAL_READS:
        moved = 2 * written
    else:
        moved = written + _tensor_bytes(inputs)
        moved += _EXTRA_READS.get(kind, 0) * (_tensor_bytes(inputs[:1]) if kind in _EXTRA_READS else 0)
        moved += _variable_bytes(node, inputs)
    element_bytes = max((info.element_bytes for info in (*outputs, *inputs) if info), default=4) or 4
    return Work(0.0, moved, max(1.0, moved / element_bytes / ELEMENTS_A_PIECE))


def _variable_bytes(node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None]) -> float:
    """What is read and written behind handles: each variable is as large as the value that goes in."""
    handles = sum(info is not None and info.dtype == "resource" for info in inputs)
    values = [info for info in inputs if info is not None and info.is_number]
    if not handles or not values:
        return 0.0
    passes = 1 if node.op == "AssignVariableOp" else 2
    return passes * handles * max(_tensor_bytes([info]) for info in values)


def _matmul(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    left, out = _dims(inputs[0]), _dims(outputs[0])
    transposed = any(name in node.attr and node.attr[name].b for name in ("transpose_a", "adj_x"))
    summed = left[-2] if transposed else left[-1]
    batch = math.prod(out[:-2])
    flop = 2.0 * math.prod(out) * summed
    return Work(flop, _moved(inputs, outputs), gemm_pieces(out[-2], out[-1], summed, batch))


def _moved(inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]) -> float:
    return _tensor_bytes(inputs) + _tensor_bytes(outputs[:1])


def _conv(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    kernel, out = _dims(inputs[1]), _elements(outputs[0])
    summed = math.prod(kernel[:-1])
    pieces = gemm_pieces(out / kernel[-1], kernel[-1], summed)
    return Work(2.0 * out * summed, _moved(inputs, outputs), pieces)


def _conv_input_gradient(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    kernel, gradient, out = _dims(inputs[1]), _elements(inputs[2]), _elements(outputs[0])
    summed = math.prod(kernel[:-2]) * kernel[-1]
    pieces = gemm_pieces(out / kernel[-2], kernel[-2], summed)
    return Work(2.0 * gradient * math.prod(kernel[:-1]), _moved(inputs, outputs), pieces)


def _conv_filter_gradient(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    kernel, gradient = _dims(outputs[0]), _elements(inputs[2])
    rows = math.prod(kernel[:-1])
    return Work(
        2.0 * gradient * rows, _moved(inputs, outputs), gemm_pieces(rows, kernel[-1], gradient / kernel[-1])
    )


def _depthwise(position: int | None, gradient: int | None) -> _Rule:
    """Depthwise convolutions; which input (None: output 0) is the kernel, which the output's side."""

    def rule(
        node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
    ) -> Work:
        kernel = _dims(outputs[0] if position is None else inputs[position])
        out = _elements(outputs[0] if gradient is None else inputs[gradient])
        flop = 2.0 * out * math.prod(kernel[:-2])
        return Work(flop, _moved(inputs, outputs), max(1.0, out / ELEMENTS_A_PIECE))

    return rule


def _einsum(
    node: node_def_pb2.NodeDef, inputs: Sequence[OutputInfo | None], outputs: Sequence[OutputInfo]
) -> Work:
    """Two for every combination of the indices; an ellipsis is the indices that it stands for."""
    left, _, right = node.attr["equation"].s.decode().replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, info in zip(left.split(","), inputs, strict=False):
        dims = _dims(info)
        before, dots, after = term.partition("...")
        hidden = len(dims) - len(before) - len(after) if dots else 0
        labels = [*before, *(f".{hidden - i}" for i in range(hidden)), *after]
        for label, dim in zip(labels, dims, strict=True):
            sizes[label] = max(sizes.get(label, 1), dim)
    out = _elements(outputs[0])
    total = math.prod(sizes.values())
    summed = math.prod(size for label, size in sizes.items() if label not in right and label[0] != ".")
    flop = 2.0 * total if len(inputs) > 1 else 0.0
    return Work(flop, _moved(inputs, outputs), max(1.0, out / TILE**2) * max(1.0, summed // SPLIT_SUM))


_RULES: dict[str, _Rule] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "SparseMatMul": _matmul,
    "Einsum": _einsum,
    "XlaEinsum": _einsum,
    "Conv2D": _conv,
    "Conv3D": _conv,
    "Conv": _conv,
    "Conv2DBackpropInput": _conv_input_gradient,
    "Conv3DBackpropInput": _conv_input_gradient,
    "Conv2DBackpropFilter": _conv_filter_gradient,
    "Conv3DBackpropFilter": _conv_filter_gradient,
    "DepthwiseConv2dNative": _depthwise(1, None),
    "DepthwiseConv2dNativeBackpropInput": _depthwise(1, 2),
    "DepthwiseConv2dNativeBackpropFilter": _depthwise(None, 2),
}
