"""What the layers of the pipelines' networks compute, by formula: plain data for the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tf_ooo.costs.devices import DeviceModel, elementwise, gemm
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.layer_work import LayerWork, dense_layer
from tf_ooo.costs.models import costs_on, transformer

SEQUENCE = 128
# BERT's WordPieces (Devlin et al. 2019), GPT-2's and GPT-3's byte pairs.
WORDS = {"bert": 30522, "gpt3": 50257}
# Hidden words of a text: max_predictions_per_seq of the authors' scripts.
_HIDDEN = 20


@dataclass(frozen=True)
class Counted:
    """How layers are counted: bytes of a number; whether embedding and head are there; rows of a micro-batch,
    None: the ``batch`` of the settings."""

    element_bytes: int = 4
    ends: bool = False
    rows: int | None = None


def layers_of(script: str, settings: Any, device: DeviceModel, counted: Counted) -> tuple[LayerCosts, ...]:
    """The layers of a network of :mod:`tf_ooo.bench.paper.networks` for one micro-batch."""
    rows = counted.rows or settings["batch"]
    return costs_on(_WORKS[script](script, settings, rows, counted), device)


def _transformer(script: str, settings: Any, rows: int, counted: Counted) -> tuple[LayerWork, ...]:
    sequence, hidden = settings.get("length", SEQUENCE), settings["width"]
    works = transformer(settings["layers"], hidden, settings["heads"], sequence, rows, counted.element_bytes)
    if not counted.ends:
        return works
    answers = rows * (sequence if script == "gpt3" else _HIDDEN)
    words = WORDS[script] if settings.get("task") != "finetune" else 2
    embedding = _embedding(rows * sequence, hidden, WORDS[script], counted.element_bytes)
    return embedding, *works, dense_layer(answers, hidden, words, element_bytes=counted.element_bytes)


def _embedding(words: int, width: int, vocabulary: int, element_bytes: int) -> LayerWork:
    """Looked up, normalized; its gradient is as large as the table, as it is where the head shares it."""
    return LayerWork(
        "embedding",
        (elementwise(words * width, 6, element_bytes),),
        (),
        (elementwise(vocabulary * width, 2, element_bytes),),
        parameters=vocabulary * width,
        activation_bytes=float(words * width * element_bytes),
        output_bytes=float(words * width * element_bytes),
        element_bytes=element_bytes,
    )


def _rnn(_: str, settings: Any, rows: int, counted: Counted) -> tuple[LayerWork, ...]:
    """Plain cells: a product of all inputs at once, then one product a step."""
    width, length, size = settings["width"], settings["length"], counted.element_bytes
    inputs, step = gemm(rows * length, width, width, size), gemm(rows, width, width, size)
    around = elementwise(rows * width, 3, size)
    steps = (step, around) * length
    out_bytes = float(rows * length * width * size)
    weights = gemm(width, width, rows * length, size)
    return tuple(
        LayerWork(
            f"rnn{number}",
            (inputs, *steps),
            (*steps, inputs),
            (weights, weights),
            parameters=2 * width * width + width,
            activation_bytes=2 * out_bytes,
            output_bytes=out_bytes,
            element_bytes=size,
        )
        for number in range(settings["layers"])
    )


def _feed_forward(_: str, settings: Any, rows: int, counted: Counted) -> tuple[LayerWork, ...]:
    width = settings["width"]
    return tuple(
        dense_layer(
            rows, width, width, element_bytes=counted.element_bytes, first=not number, name=f"dense{number}"
        )
        for number in range(settings["layers"])
    )


_WORKS = {"bert": _transformer, "gpt3": _transformer, "rnn": _rnn, "feed_forward": _feed_forward}
