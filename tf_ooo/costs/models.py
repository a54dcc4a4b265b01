"""Describes the networks of published figures as lists of layers, from their papers' tables.

There is one :class:`LayerWork` per layer with weights, in forward order.  Images are 224 x 224 unless said
otherwise.  A tensor that is pooled, added or scaled is counted with the layer that does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tf_ooo.costs.devices import DeviceModel, Work, elementwise
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.layer_work import Conv, LayerWork, conv_layer, dense_layer, transformer_layer
from tf_ooo.errors import CostError

CLASSES = 1000
# These are the blocks in the four stages (ResNet, arXiv 1512.03385, table 1).
_RESNET_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
# At these depths a block has two convolutions.
_BASIC = (18, 34)
# These are channels; 0 is a pooling (VGG, arXiv 1409.1556, table 1, column D).
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
# These are the layers in the four blocks (DenseNet, arXiv 1608.06993, table 1).
_DENSENET_BLOCKS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32), 264: (6, 12, 64, 48)}
# Each row is kernel, expanded, out, squeeze-and-excite, stride (MobileNetV3, arXiv 1905.02244, table 1).
_MOBILENET_V3_LARGE = (
    (3, 16, 16, False, 1),
    (3, 64, 24, False, 2),
    (3, 72, 24, False, 1),
    (5, 72, 40, True, 2),
    (5, 120, 40, True, 1),
    (5, 120, 40, True, 1),
    (3, 240, 80, False, 2),
    (3, 200, 80, False, 1),
    (3, 184, 80, False, 1),
    (3, 184, 80, False, 1),
    (3, 480, 112, True, 1),
    (3, 672, 112, True, 1),
    (5, 672, 160, True, 2),
    (5, 960, 160, True, 1),
    (5, 960, 160, True, 1),
)


@dataclass(frozen=True)
class _Tensor:
    """Describes the input of a layer: the layers that made it, its channels, pixels of a side."""

    layers: tuple[int, ...]
    channels: int
    size: int


class _Net:
    """Adds layers one after the other, and keeps track of which layers made each tensor."""

    def __init__(self, batch: int, element_bytes: int = 4) -> None:
        self.batch, self.element_bytes = batch, element_bytes
        self.layers: list[LayerWork] = []

    def conv(
        self,
        x: _Tensor,
        channels: int,
        kernel: int,
        stride: int = 1,
        *,
        groups: int = 1,
        norm: str = "after",
        residual: _Tensor | None = None,
        name: str = "",
    ) -> _Tensor:
        """Add a convolution and return its output; ``residual`` is added to that."""
        shape = Conv(self.batch, x.size, x.channels, channels, kernel, stride, groups)
        layer = conv_layer(
            shape,
            norm=norm,
            element_bytes=self.element_bytes,
            first=not x.layers,
            residual=residual is not None,
            name=name,
            inputs=tuple(sorted({*x.layers, *(residual.layers if residual else ())})),
        )
        return self._append(layer, channels, shape.size_out)

    def dense(self, x: _Tensor, units: int, *, name: str = "") -> _Tensor:
        """Add a fully connected layer and return its output; a tensor with pixels is flattened."""
        units_in = x.channels * x.size**2
        layer = dense_layer(
            self.batch, units_in, units, element_bytes=self.element_bytes, name=name, inputs=x.layers
        )
        return self._append(layer, units, 1)

    def pool(self, x: _Tensor, stride: int) -> _Tensor:
        """Add pooling to the layer that made the tensor, and return the smaller tensor."""
        size = -(-x.size // stride)
        small, large = (self.batch * side**2 * x.channels for side in (size, x.size))
        self.also(x.layers[-1], elementwise(small + large, 1, self.element_bytes))
        if len(x.layers) == 1:
            self.change(x.layers[0], output_bytes=float(small * self.element_bytes))
        return replace(x, size=size)

    def over(self, index: int, x: _Tensor, passes: float) -> None:
        """Count passes over a tensor, forward and backward, with one layer."""
        self.also(index, elementwise(self.batch * x.size**2 * x.channels, passes, self.element_bytes))

    def also(self, index: int, work: Work) -> None:
        layer = self.layers[index]
        self.change(index, forward=(*layer.forward, work), output_grad=(work, *layer.output_grad))

    def change(self, index: int, **fields: Any) -> None:
        self.layers[index] = replace(self.layers[index], **fields)

    def _append(self, layer: LayerWork, channels: int, size: int) -> _Tensor:
        self.layers.append(layer)
        return _Tensor((len(self.layers) - 1,), channels, size)


def vgg16(batch: int, image: int = 224, element_bytes: int = 4) -> tuple[LayerWork, ...]:
    """Return VGG-16: 13 convolutions, 3 fully connected layers; 138.4 M parameters, 15.5 GMAC an image."""
    net, x = _Net(batch, element_bytes), _Tensor((), 3, image)
    for channels in _VGG16:
        if channels:
            x = net.conv(x, channels, 3, norm="none", name=f"conv{len(net.layers)}")
        else:
            x = net.pool(x, 2)
    for units in (4096, 4096, CLASSES):
        x = net.dense(x, units, name=f"fc{len(net.layers) - 13}")
    return tuple(net.layers)


def resnet(depth: int, batch: int, image: int = 224, element_bytes: int = 4) -> tuple[LayerWork, ...]:
    """Return ResNet-18, -34, -50, -101 or -152; the 3 x 3 convolutions have the strides ("v1.5").

    ResNet-18: 11.7 M parameters, 1.8 GMAC an image; ResNet-50: 25.6 M, 4.1; ResNet-101: 44.5 M, 7.8.
    """
    if depth not in _RESNET_BLOCKS:
        raise CostError(f"resnet: depth must be one of {sorted(_RESNET_BLOCKS)}, got {depth!r}")
    net = _Net(batch, element_bytes)
    x = net.conv(_Tensor((), 3, image), 64, 7, 2, name="conv1")
    x = net.pool(x, 2)
    for stage, blocks in enumerate(_RESNET_BLOCKS[depth]):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x = _residual_block(
                net, x, 64 << stage, stride, depth in _BASIC, f"stage{stage + 1}/block{block + 1}"
            )
    net.dense(net.pool(x, x.size), CLASSES, name="fc")
    return tuple(net.layers)


def _residual_block(net: _Net, x: _Tensor, width: int, stride: int, basic: bool, name: str) -> _Tensor:
    out = width if basic else 4 * width
    shortcut = x
    if stride > 1 or x.channels != out:
        shortcut = net.conv(x, out, 1, stride, name=f"{name}/shortcut")
    # These are (channels, kernel, stride) before the last one: two of 3 x 3, or 1 x 1, 3 x 3, 1 x 1.
    shapes = [(width, 3, stride)] if basic else [(width, 1, 1), (width, 3, stride)]
    for number, shape in enumerate(shapes, 1):
        x = net.conv(x, *shape, name=f"{name}/conv{number}")
    return net.conv(x, out, 3 if basic else 1, residual=shortcut, name=f"{name}/conv{len(shapes) + 1}")


def densenet(
    depth: int, batch: int, growth: int = 32, image: int = 224, element_bytes: int = 4
) -> tuple[LayerWork, ...]:
    """Return DenseNet; 121 layers of growth 32: 8.0 M parameters, 2.87 GMAC an image.

    The first layer has 2 x growth channels (arXiv 1608.06993, section 4).  Concatenation copies.
    """
    net = _Net(batch, element_bytes)
    x = net.conv(_Tensor((), 3, image), 2 * growth, 7, 2, name="conv0")
    x = net.pool(x, 2)
    blocks = _DENSENET_BLOCKS[depth]
    for number, layers in enumerate(blocks, 1):
        for _ in range(layers):
            x = _dense_block_layer(net, x, growth, number)
        if number < len(blocks):
            y = net.conv(x, x.channels // 2, 1, norm="before", name=f"transition{number}/{len(net.layers)}")
            net.over(y.layers[0], x, 2)
            x = net.pool(y, 2)
    fc = net.dense(replace(x, size=1), CLASSES, name="fc")
    net.over(fc.layers[0], x, 6)  # concatenation, normalization, pooling
    net.change(-1, parameters=net.layers[-1].parameters + 2 * x.channels)
    return tuple(net.layers)


def _dense_block_layer(net: _Net, x: _Tensor, growth: int, block: int) -> _Tensor:
    y = net.conv(x, 4 * growth, 1, norm="before", name=f"block{block}/{len(net.layers)}")
    net.over(y.layers[0], x, 2)
    y = net.conv(y, growth, 3, norm="before", name=f"block{block}/{len(net.layers)}")
    return _Tensor(x.layers + y.layers, x.channels + growth, x.size)


def mobilenet_v3_large(
    batch: int, alpha: float = 1.0, image: int = 224, element_bytes: int = 4
) -> tuple[LayerWork, ...]:
    """Return MobileNetV3-Large, channels times ``alpha``; 1.0: 5.4 M parameters, 0.219 GMAC an image."""
    net = _Net(batch, element_bytes)
    x = net.conv(_Tensor((), 3, image), _rounded(16 * alpha), 3, 2, name="conv0")
    for number, row in enumerate(_MOBILENET_V3_LARGE, 1):
        x = _inverted_residual(net, x, row, alpha, f"block{number}")
    x = net.conv(x, _rounded(960 * alpha), 1, name="conv_last")
    x = net.pool(x, x.size)
    x = net.dense(x, 1280 if alpha <= 1 else _rounded(1280 * alpha), name="fc1")
    net.dense(x, CLASSES, name="fc2")
    return tuple(net.layers)


def _inverted_residual(
    net: _Net, x: _Tensor, row: tuple[int, int, int, bool, int], alpha: float, name: str
) -> _Tensor:
    kernel, expanded, out, squeeze, stride = row
    expanded, out = _rounded(expanded * alpha), _rounded(out * alpha)
    y = x if expanded == x.channels else net.conv(x, expanded, 1, name=f"{name}/expand")
    y = net.conv(y, expanded, kernel, stride, groups=expanded, name=f"{name}/depthwise")
    scale: tuple[int, ...] = ()
    if squeeze:
        s = net.conv(replace(y, size=1), _rounded(expanded / 4), 1, norm="none", name=f"{name}/squeeze")
        net.over(s.layers[0], y, 1)
        scale = net.conv(s, expanded, 1, norm="none", name=f"{name}/excite").layers
    residual = x if stride == 1 and out == x.channels else None
    z = net.conv(y, out, 1, residual=residual, name=f"{name}/project")
    if squeeze:
        (project,) = z.layers
        net.over(project, y, 2)
        net.change(project, inputs=tuple(sorted({*(net.layers[project].inputs or ()), *scale})))
    return z


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8, never more than a tenth below (the authors' ``make_divisible``)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def transformer(
    layers: int, hidden: int, heads: int, seq: int, microbatch: int, element_bytes: int = 2
) -> tuple[LayerWork, ...]:
    """Return GPT or BERT: equal layers. Embedding and head are left out: published pipelines balance them by
    giving the first and last stage one layer less (Zero Bubble, arXiv 2401.10241, section 5.1)."""
    return tuple(
        transformer_layer(hidden, heads, seq, microbatch, f"layer{index}", element_bytes)
        for index in range(layers)
    )


MODELS: dict[str, Callable[..., tuple[LayerWork, ...]]] = {
    "vgg16": vgg16,
    **{f"resnet{depth}": partial(resnet, depth) for depth in _RESNET_BLOCKS},
    **{f"densenet{depth}": partial(densenet, depth) for depth in _DENSENET_BLOCKS},
    "mobilenet_v3_large": mobilenet_v3_large,
    "transformer": transformer,
}


def model_costs(name: str, device: DeviceModel, slots: int = 0, **options: Any) -> tuple[LayerCosts, ...]:
    """Return the layers of a model with seconds on a device: ``model_costs("resnet50", device("v100"),
    batch=128)``.

    Args:
        name: a key of :data:`MODELS`.
        device: from :mod:`tf_ooo.costs.devices`.
        slots: optimizer variables for each weight (SGD 0, momentum 1, Adam 2).
        options: what the model's builder is given.

    Raises:
        CostError: no such model, or its builder takes other options.
    """
    if name not in MODELS:
        raise CostError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    try:
        works = MODELS[name](**options)
    except TypeError as error:
        raise CostError(f"model {name!r}: {error}") from error
    return costs_on(works, device, slots)


def costs_on(works: Sequence[LayerWork], device: DeviceModel, slots: int = 0) -> tuple[LayerCosts, ...]:
    """Return the costs of these layers on a device."""
    return tuple(work.costs(device, slots) for work in works)
