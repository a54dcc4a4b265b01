"""The layers of emulated models take these seconds, for one micro-batch."""

from typing import Any

import numpy as np

from tf_ooo.costs.devices import device
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.layer_work import dense_layer, transformer_layer
from tf_ooo.costs.table import CostTable
from tf_ooo.demo.training import gpt_shares

# Messages are small: what they take is the runtime's own time.
ROWS, WIDTH = 2, 1024
# Megatron-LM reached this share of the peaks in NVIDIA's data sheet (312 TFLOP/s in 16 bits, 2039 GB/s) with
# 1.7 B weights (arXiv 2104.04473, table 1).
_A100 = device("a100", "fp16").derated(0.44)
_HIDDEN, _HEADS, _SEQUENCE, _MICROBATCH = 1024, 16, 512, 16
# Words, and the share of the tokens that have a loss.
_TRANSFORMERS = {"bert_large": (30_522, 0.15), "gpt2": (50_257, 1.0)}


def _rows(model: str, layers: int) -> list[tuple[float, float, float]]:
    """Return F, dO and dW of layers: seconds of a transformer on an A100, from its FLOP and bytes, or shares.

    ``bert_large`` (arXiv 1810.04805) and ``gpt2`` medium (Radford et al. 2019): the last layer is the output
    matrix; the embedding's look-up is left out.  ``equal``: all alike.  ``gpt``: an embedding, which takes
    next to nothing, blocks, and a head of two and a half blocks.  ``unet``: they fall to a third towards the
    middle.
    """
    if model in _TRANSFORMERS:
        words, share = _TRANSFORMERS[model]
        blocks = [transformer_layer(_HIDDEN, _HEADS, _SEQUENCE, _MICROBATCH)] * (layers - 1)
        head = dense_layer(round(_SEQUENCE * _MICROBATCH * share), _HIDDEN, words, element_bytes=2)
        costs = [work.costs(_A100) for work in (*blocks, head)]
        return [(of.forward_s, of.output_grad_s, of.weight_grad_s) for of in costs]
    if model == "gpt":
        return gpt_shares(layers - 2)
    far = np.abs(np.linspace(-1, 1, layers)) if model == "unet" else np.full(layers, 0.5)
    return [(0.5 + x, 0.5 + x, 0.5 + x) for x in far.tolist()]


def costs_of(model: str, layers: int, devices: int, task_s: float | None, latency_s: float) -> CostTable:
    """Return the layers' seconds; ``task_s``: of all F of a device on average, None: the model says it.

    No step computes the first layer's dO.
    """
    rows, output_bytes = _rows(model, layers), 4.0 * ROWS * WIDTH
    unit_s = 1.0 if task_s is None else task_s * devices / sum(forward for forward, _, _ in rows)
    like: dict[str, Any] = {"activation_bytes": output_bytes, "output_bytes": output_bytes}
    like["weight_bytes"] = 4.0 * WIDTH
    costs = [
        LayerCosts(f * unit_s, do * unit_s if n else 0.0, dw * unit_s, name=f"layer_{n:03d}", **like)
        for n, (f, do, dw) in enumerate(rows)
    ]
    return CostTable(tuple(costs), Link(latency_s), rows=ROWS)
