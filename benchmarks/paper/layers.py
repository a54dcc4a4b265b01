"""What the layers of the pipelines' networks compute, by formula."""

from __future__ import annotations

from typing import Any

from tf_ooo.costs.devices import DeviceModel, elementwise, gemm
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.layer_work import LayerWork, dense_layer
from tf_ooo.costs.models import costs_on, transformer

# BERT's WordPieces (Devlin et al. 2019), GPT-2's and GPT-3's byte pairs.
WORDS = {"bert": 30522, "gpt3": 50257}
# Numbers have 4 bytes.  Of the authors' scripts: words of a text, and hidden ones (max_predictions_per_seq).
BYTES, _LENGTH, _HIDDEN = 4, 128, 20


def layers_of(script: str, settings: Any, device: DeviceModel, ends: bool) -> tuple[LayerCosts, ...]:
    """The layers of a network for one micro-batch; ``ends``: also embedding and head, if it has words."""
    if script == "rnn":
        return costs_on([_rnn(settings)] * settings["layers"], device)
    width, rows = settings["width"], settings["batch"]
    if script == "feed_forward":
        dense = [
            dense_layer(rows, width, width, first=not number, name=f"dense{number}")
            for number in range(settings["layers"])
        ]
        return costs_on(dense, device)
    length = settings.get("length", _LENGTH)
    works = transformer(settings["layers"], width, settings["heads"], length, rows, BYTES)
    if ends:
        answers = rows * (length if script == "gpt3" else _HIDDEN)
        words = WORDS[script] if settings.get("task") != "finetune" else 2
        head = dense_layer(answers, width, words, name="head")
        works = (_embedding(rows * length, width, WORDS[script]), *works, head)
    return costs_on(works, device)


def table_bytes(script: str, settings: Any) -> float:
    """Bytes of the table that embedding and head share; 0 where they share none."""
    shares = script in WORDS and settings.get("task") != "finetune"
    return float(BYTES * WORDS[script] * settings["width"]) if shares else 0.0


def _embedding(words: int, width: int, vocabulary: int) -> LayerWork:
    """Words are looked up and normalized; the gradient is as large as the table."""
    out_bytes = float(words * width * BYTES)
    return LayerWork(
        "embedding",
        (elementwise(words * width, 6, BYTES),),
        (),
        (elementwise(vocabulary * width, 2, BYTES),),
        parameters=vocabulary * width,
        activation_bytes=out_bytes,
        output_bytes=out_bytes,
        element_bytes=BYTES,
    )


def _rnn(settings: Any) -> LayerWork:
    """Plain cells: a product of all inputs at once, then one product a step."""
    width, length, rows = settings["width"], settings["length"], settings["batch"]
    inputs = gemm(rows * length, width, width, BYTES)
    steps = (gemm(rows, width, width, BYTES), elementwise(rows * width, 3, BYTES)) * length
    weights = gemm(width, width, rows * length, BYTES)
    out_bytes = float(rows * length * width * BYTES)
    return LayerWork(
        "rnn",
        (inputs, *steps),
        (*steps, inputs),
        (weights, weights),
        parameters=2 * width * width + width,
        activation_bytes=2 * out_bytes,
        output_bytes=out_bytes,
        element_bytes=BYTES,
    )
