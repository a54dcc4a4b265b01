"""The layers that LayerPipe and PipeDream are compared on, on paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.layer_work import LayerWork, dense_layer
from tf_ooo.costs.models import resnet, vgg16

Shape = tuple[int, int, int]
BATCH = 32
# A plain network for 28 x 28 images; three of its layers are equal and heavy.
MLP_WIDTHS = (784, 2048, 2048, 2048, 2048, 10)
# Of VGG-16's layers: pixels of a side of the output, sums of a product, outputs.
_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
_SIZES = (224, 224, 112, 112, 56, 56, 56, 28, 28, 28, 14, 14, 14)
# Layers of ResNet-50 whose output is pooled: the sums of their products.
_POOLED_SUMS = {"conv1": 147, "stage4/block3/conv3": 512}
_DENSE = ((1, 25088, 4096), (1, 4096, 4096), (1, 4096, 1000))


def flop_costs(works: Sequence[LayerWork]) -> tuple[LayerCosts, ...]:
    """Forward GFLOP."""
    return _costs(works, [work.flop()[0] / 1e9 for work in works])


def cycle_costs(works: Sequence[LayerWork], shapes: Sequence[Shape], array: int) -> tuple[LayerCosts, ...]:
    """Millions of clock cycles on ``array`` x ``array`` multipliers.

    A product of M x K times K x N takes M cycles for each full or partly filled array that its K x N
    weights need; dO is M x N times N x K, dW as long as F.
    """
    cycles = [m * math.ceil(k / array) * math.ceil(n / array) for m, k, n in shapes]
    return _costs(works, [BATCH * count / 1e6 for count in cycles])


def _costs(works: Sequence[LayerWork], takes: Sequence[float]) -> tuple[LayerCosts, ...]:
    """F, dO and dW of a layer take the same; the first layer has no dO."""
    return tuple(
        LayerCosts(
            forward,
            forward if index else 0.0,
            forward,
            activation_bytes=work.activation_bytes,
            weight_bytes=float(work.parameters * work.element_bytes),
            output_bytes=work.output_bytes,
            inputs=work.inputs,
            name=work.name,
        )
        for index, (work, forward) in enumerate(zip(works, takes, strict=True))
    )


def vgg16_shapes() -> list[Shape]:
    """(M, K, N) of VGG-16's layers."""
    convolutions = zip(_SIZES, _CHANNELS, _CHANNELS[1:], strict=False)
    return [*((size**2, 9 * read, written) for size, read, written in convolutions), *_DENSE]


def resnet50_shapes() -> list[Shape]:
    """(M, K, N) of ResNet-50's layers, from their FLOP, weights (with two of a norm) and outputs."""
    shapes = []
    for work in resnet(50, BATCH):
        forward = work.flop()[0]
        elements = work.output_bytes / work.element_bytes
        sums = _POOLED_SUMS.get(work.name) or round(forward / 2 / elements)
        outputs = round(work.parameters / (sums + 2))
        shapes.append((round(forward / 2 / sums / outputs / BATCH), sums, outputs))
    return shapes


def mlp(batch: int) -> tuple[LayerWork, ...]:
    """A fully connected network of :data:`MLP_WIDTHS`."""
    pairs = zip(MLP_WIDTHS, MLP_WIDTHS[1:], strict=False)
    return tuple(
        dense_layer(batch, a, b, first=not i, name=f"dense{i}", inputs=(i - 1,) if i else ())
        for i, (a, b) in enumerate(pairs)
    )


@dataclass(frozen=True)
class PaperNetwork:
    """Layers, and in what unit their "seconds" are."""

    layers: Callable[[], tuple[LayerCosts, ...]]
    unit: str


_CYCLES = "million cycles"
WORKLOADS = {
    "vgg16": PaperNetwork(lambda: flop_costs(vgg16(BATCH)), "GFLOP"),
    "resnet18": PaperNetwork(lambda: flop_costs(resnet(18, BATCH)), "GFLOP"),
    "resnet50": PaperNetwork(lambda: flop_costs(resnet(50, BATCH)), "GFLOP"),
    "mlp": PaperNetwork(lambda: flop_costs(mlp(BATCH)), "GFLOP"),
    "vgg16-array64": PaperNetwork(lambda: cycle_costs(vgg16(BATCH), vgg16_shapes(), 64), _CYCLES),
    "vgg16-array128": PaperNetwork(lambda: cycle_costs(vgg16(BATCH), vgg16_shapes(), 128), _CYCLES),
    "vgg16-array256": PaperNetwork(lambda: cycle_costs(vgg16(BATCH), vgg16_shapes(), 256), _CYCLES),
    "resnet50-array128": PaperNetwork(
        lambda: cycle_costs(resnet(50, BATCH), resnet50_shapes(), 128), _CYCLES
    ),
}
