"""Calculates FLOP and bytes of whole layers by formula. Elementwise work is fused as XLA and cuDNN do it: a
normalization with its activation reads the tensor twice and writes it once; backward takes five passes."""

from __future__ import annotations

from dataclasses import dataclass

from tf_ooo.costs.devices import DeviceModel, Work, elementwise, gemm, gemm_pieces
from tf_ooo.costs.layer_costs import LayerCosts

NORM_FORWARD, NORM_BACKWARD = 3, 5
# Plain SGD reads weight and gradient and writes the weight; each slot is also read and written.
_UPDATE_PASSES, _SLOT_PASSES = 3, 2


@dataclass(frozen=True)
class LayerWork:
    """Holds a layer's kernels in order, and its sizes for one micro-batch, as in :class:`LayerCosts`."""

    name: str
    forward: tuple[Work, ...]
    output_grad: tuple[Work, ...]
    weight_grad: tuple[Work, ...]
    parameters: int = 0
    activation_bytes: float = 0
    output_bytes: float = 0
    weight_grad_bytes: float | None = None
    inputs: tuple[int, ...] | None = None
    element_bytes: int = 4

    def flop(self) -> tuple[float, float, float]:
        """Return the FLOP of the matrix products and convolutions of F, dO and dW."""
        forward, output_grad, weight_grad = (sum(work.flop for work in kind) for kind in self._kernels)
        return forward, output_grad, weight_grad

    @property
    def _kernels(self) -> tuple[tuple[Work, ...], ...]:
        return self.forward, self.output_grad, self.weight_grad

    def costs(self, device: DeviceModel, slots: int = 0) -> LayerCosts:
        """Return seconds and bytes on a device; ``slots`` is the number of optimizer variables per weight."""
        weight_bytes = float(self.parameters * self.element_bytes)
        passes = _UPDATE_PASSES + slots * _SLOT_PASSES
        update = (elementwise(self.parameters, passes, self.element_bytes),) if self.parameters else ()
        forward_share, output_share, weight_share = (device.occupancy(kind) for kind in self._kernels)
        return LayerCosts(
            forward_s=device.seconds(*self.forward),
            output_grad_s=device.seconds(*self.output_grad),
            weight_grad_s=device.seconds(*self.weight_grad),
            update_s=device.seconds(*update),
            activation_bytes=self.activation_bytes,
            weight_bytes=weight_bytes,
            output_bytes=self.output_bytes,
            weight_grad_bytes=self.weight_grad_bytes,
            inputs=self.inputs,
            occupancy=(forward_share, output_share, weight_share),
            name=self.name,
            slot_bytes=slots * weight_bytes,
        )


def transformer_flop(hidden: int, seq: int, microbatch: int) -> tuple[float, float, float]:
    """Return FLOP of F, dO and dW of a transformer layer: sbh(24h + 4s), sbh(24h + 8s), sbh(24h).

    The formulas are from Zero Bubble, arXiv 2401.10241, table 1; they leave out norms and softmax.
    """
    sbh = float(seq * microbatch * hidden)
    return sbh * (24 * hidden + 4 * seq), sbh * (24 * hidden + 8 * seq), sbh * 24 * hidden


def transformer_activation_bytes(hidden: int, heads: int, seq: int, microbatch: int) -> float:
    """Return a layer's kept bytes, sbh(34 + 5as/h) (Korthikanti et al., arXiv 2205.05198, equation 1)."""
    return float(seq * microbatch * (34 * hidden + 5 * heads * seq))


def transformer_layer(
    hidden: int, heads: int, seq: int, microbatch: int, name: str = "", element_bytes: int = 2
) -> LayerWork:
    """Return a GPT/BERT layer of feed-forward width 4h (Zero Bubble, table 1), in 16-bit or longer numbers.

    Kept bytes grow with the size of numbers; the published figure is for 16 bits, and dropout masks in it
    would not grow.
    """
    rows, size = seq * microbatch, element_bytes
    products = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    forward = [gemm(rows, columns, summed, size) for columns, summed in products]
    output_grad = [gemm(rows, summed, columns, size) for columns, summed in products]
    weight_grad = [gemm(summed, columns, rows, size) for columns, summed in products]
    pairs = microbatch * heads
    scores = gemm(seq, seq, hidden / heads, size, pairs)
    context = gemm(seq, hidden / heads, seq, size, pairs)
    # Two layer norms (3 passes), two dropout + residual (3), GeLU on 4h (2 x 4); softmax + dropout (4).
    around = [elementwise(rows * hidden, passes, size) for passes in (3, 3, 3, 3, 8)]
    attention = [elementwise(pairs * seq * seq, 4, size)]
    # Their gradients: 5 for each norm, 2 and 2 for dropout, 3 x 4 for GeLU; 6 for softmax + dropout.
    around_back = [elementwise(rows * hidden, passes, size) for passes in (5, 5, 2, 2, 12)]
    attention_back = [elementwise(pairs * seq * seq, 6, size)]
    return LayerWork(
        name=name,
        forward=(*forward, scores, context, *around, *attention),
        output_grad=(*output_grad, scores, scores, context, context, *around_back, *attention_back),
        weight_grad=tuple(weight_grad),
        # Four products with biases, and the scale and offset of two norms.
        parameters=12 * hidden * hidden + 13 * hidden,
        activation_bytes=transformer_activation_bytes(hidden, heads, seq, microbatch) * (size / 2),
        output_bytes=float(size * rows * hidden),
        weight_grad_bytes=16.0 * size * rows * hidden,
        element_bytes=size,
    )


def dense_layer(
    rows: int,
    units_in: int,
    units_out: int,
    *,
    element_bytes: int = 4,
    first: bool = False,
    name: str = "",
    inputs: tuple[int, ...] | None = None,
) -> LayerWork:
    """Return a fully connected layer with bias and activation on ``rows`` examples; ``first``: without dO."""
    out = rows * units_out
    activation = elementwise(out, 2, element_bytes)
    return LayerWork(
        name=name,
        forward=(gemm(rows, units_out, units_in, element_bytes), activation),
        output_grad=() if first else (activation, gemm(rows, units_in, units_out, element_bytes)),
        weight_grad=(gemm(units_in, units_out, rows, element_bytes),),
        parameters=units_in * units_out + units_out,
        activation_bytes=float(rows * (units_in + units_out) * element_bytes),
        output_bytes=float(out * element_bytes),
        inputs=inputs,
        element_bytes=element_bytes,
    )


@dataclass(frozen=True)
class Conv:
    """Holds the shape of a 2-D convolution with "same" padding; sizes are pixels of a side."""

    batch: int
    size: int
    channels_in: int
    channels_out: int
    kernel: int
    stride: int = 1
    groups: int = 1

    @property
    def size_out(self) -> int:
        return -(-self.size // self.stride)

    @property
    def elements_in(self) -> int:
        return self.batch * self.size**2 * self.channels_in

    @property
    def elements_out(self) -> int:
        return self.batch * self.size_out**2 * self.channels_out

    @property
    def weights(self) -> int:
        return self.kernel**2 * self.channels_in * self.channels_out // self.groups

    @property
    def flop(self) -> float:
        """Return the flop of each of F, dO and dW: two for each weight that an output element uses."""
        return 2.0 * self.elements_out * self.weights / self.channels_out

    def work(self, kind: str, element_bytes: int) -> Work:
        """Return the work of ``"F"``, ``"dO"`` or ``"dW"``, computed as an implicit matrix product."""
        summed = self.weights / self.channels_out
        group_in, group_out = self.channels_in / self.groups, self.channels_out / self.groups
        pixels_in, pixels_out = self.batch * self.size**2, self.batch * self.size_out**2
        shapes = {
            "F": (pixels_out, group_out, summed),
            "dO": (pixels_in, group_in, group_out * self.kernel**2),
            "dW": (summed, group_out, pixels_out),
        }
        moved = self.elements_in + self.weights + self.elements_out
        return Work(self.flop, float(moved * element_bytes), gemm_pieces(*shapes[kind], batch=self.groups))


def conv_layer(
    shape: Conv,
    *,
    norm: str = "after",
    element_bytes: int = 4,
    first: bool = False,
    residual: bool = False,
    name: str = "",
    inputs: tuple[int, ...] | None = None,
) -> LayerWork:
    """Return a convolution with what surrounds it; ``residual`` adds another tensor to its output.

    ``norm``: normalization and activation come ``"after"`` the convolution, or ``"before"`` it, on the input,
    which is then stored twice; ``"none"``: only bias and activation.  ``first``: the input is the data, so
    that dO has no convolution.
    """
    normed = shape.elements_in if norm == "before" else shape.elements_out
    forward_passes, backward_passes = (2, 3) if norm == "none" else (NORM_FORWARD, NORM_BACKWARD)
    forward = [shape.work("F", element_bytes), elementwise(normed, forward_passes, element_bytes)]
    output_grad = [elementwise(normed, backward_passes, element_bytes)]
    if not first:
        output_grad.append(shape.work("dO", element_bytes))
    if residual:
        forward.append(elementwise(shape.elements_out, 3, element_bytes))
        output_grad.append(elementwise(shape.elements_out, 3, element_bytes))
    kept = shape.elements_in + (normed if norm != "none" else 0)
    norm_weights = {"after": 2 * shape.channels_out, "before": 2 * shape.channels_in}
    return LayerWork(
        name=name,
        forward=tuple(forward),
        output_grad=tuple(output_grad),
        weight_grad=(shape.work("dW", element_bytes),),
        parameters=shape.weights + norm_weights.get(norm, shape.channels_out),
        activation_bytes=float(kept * element_bytes),
        output_bytes=float(shape.elements_out * element_bytes),
        inputs=inputs,
        element_bytes=element_bytes,
    )
