"""A set-up from a number: every kind has its turn, all else is chance."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.setups import Ranks
from tests.fuzz.several import MEASURED, ORDERS, epochs_after, launch_of
from tests.harness.drawing import Cases, Draw

BATCH_SIZE = 8
ROW_OPS = ("mean", "deviation", "largest", "sum", "cumulative", "sorted", "softmax", "rolled", "gram")
# These are drawn of each kind; the training of one device never differs by it.
KINDS: dict[str, tuple[str, ...]] = {
    "plain": ("",),
    "sparse input": ("one layer", "two layers"),
    "ops over rows": ROW_OPS,
    "Lambda over rows": ROW_OPS,
    "Model.call over rows": ROW_OPS,
    "layer over rows": ("Softmax", "UnitNormalization", "LayerNormalization"),
    "loss over rows": ("variance", "pairs", "largest", "sum"),
    "own logs": ("rows", "largest", "norm", "rate", "shape", "smallest", "mean", "all"),
    "layer that assigns": ("counter", "decay", "spectral", "largest seen", "moving mean"),
    "frozen": ("argument", "attribute", "model", "first"),
    "frozen after compile": ("frozen", "thawed", "compiled again"),
    "remat": ("remat", "recompute_grad", "convolution"),
    "autograph loop": ("unused", "over tensors", "sum of losses", "updates inside"),
    "scaled gradients": ("prediction", "loss", "data", "number", "random", "norm"),
    "half precision": ("mixed_float16", "overflow", "mixed_bfloat16"),
    "BatchNormalization": ("default", "momentum", "whole_batch", "not trainable"),
    "Dropout": ("Dropout", "GaussianNoise", "GaussianDropout"),
    "several models": ("trained before", "rewritten before", "shares a layer", "fitted twice"),
    "several optimizers": ("halves", "compiled twice", "in turns"),
    "accumulation": ("option", "by hand"),
}
BODIES = ("dense", "dense", "dense", "conv1d", "conv2d", "tokens", "lstm")
NARROW = ("sparse input", "layer over rows", "several optimizers")
OPTIMIZERS = (
    ("SGD", {"learning_rate": 0.05}),
    ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"learning_rate": 0.01, "epsilon": 1e-3}),
    ("AdamW", {"learning_rate": 0.01, "epsilon": 1e-3}),
    ("RMSprop", {"learning_rate": 0.01, "epsilon": 1e-3}),
    ("RMSprop", {"learning_rate": 0.01, "epsilon": 1e-3, "momentum": 0.5, "centered": True}),
    ("Adagrad", {"learning_rate": 0.05}),
    ("Adamax", {"learning_rate": 0.01, "epsilon": 1e-3}),
    ("SGD", {"learning_rate": 0.05, "global_clipnorm": 0.5}),
    ("SGD", {"learning_rate": 0.05, "clipnorm": 0.3}),
    ("Adam", {"learning_rate": 0.01, "epsilon": 1e-3, "use_ema": True}),
)
PIPELINES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "auto", "zb_v", "interleaved_1f1b")


@dataclass(frozen=True)
class OwnSetup:
    """One training.

    Attributes:
        share: how large the term is in which rows meet.
        seed: of a layer that draws random numbers.
        options: those of the callback.
        dtype: of all that computes.
    """

    number: int
    mode: str
    kind: str
    variant: str
    body: str
    widths: tuple[int, int]
    activation: str
    optimizer: tuple[str, dict[str, Any]]
    loss: str
    rows: int
    metrics: tuple[str, ...]
    share: float
    seed: int
    as_dataset: bool
    steps_per_execution: int
    options: dict[str, Any]
    epochs: int = 2
    ranks: Ranks | None = None
    dtype: str = "float32"

    @property
    def microbatches(self) -> int:
        return self.options.get("microbatches", 1)

    @property
    def title(self) -> str:
        return f"{self.kind} ({self.variant})" if self.variant else self.kind


@functools.cache
def cases(mode: str) -> Cases[OwnSetup]:
    """The model of a number is the same in all modes."""
    options_of = {
        "single": _single,
        "pipeline": _pipeline,
        "data_parallel": _ranks,
        "compiled_pipeline": _compiled,
    }
    return Cases(lambda draw: options_of[mode](_setup_of(draw, mode), draw))


@functools.cache
def drawn(number: int, mode: str = "single") -> OwnSetup:
    return cases(mode).drawn(number)


def _setup_of(draw: Draw, mode: str) -> OwnSetup:
    kind = draw.in_turn(tuple(KINDS))
    return OwnSetup(
        draw.number,
        mode,
        kind,
        # Each once in as many turns of its kind.
        draw.in_turn(KINDS[kind], draw.number // len(KINDS)),
        "dense" if kind in NARROW else draw.choice(BODIES),
        (draw.choice((4, 5, 8)), draw.choice((3, 6, 8))),
        draw.choice(("relu", "tanh", "gelu", "sigmoid")),
        # Keras' own averages are overwritten by place, and fail where a layer was frozen.
        draw.choice(OPTIMIZERS[:-1] if kind == "frozen after compile" else OPTIMIZERS),
        draw.choice(("mse", "mse", "huber", "mae", "binary_crossentropy")),
        draw.choice((16, 16, 20, 17, 24)),
        draw.choice(((), (), ("mae",), ("mse", "mae"))),
        draw.choice((1.0, 1e-3, 0.1)),
        draw.choice((1, 2, 3)),
        draw.chance(0.5) or kind == "sparse input",
        draw.choice((1, 1, 1, 2)),
        {"profile_steps": draw.choice((0, 0, 0, 1, 2))},
    )


def _single(setup: OwnSetup, draw: Draw) -> OwnSetup:
    schedule = draw.choice(("fast_forward", "fast_forward", "in_order", "auto"))
    return replace(setup, options={**setup.options, "mode": "single_device", "schedule": schedule})


def _pipeline(setup: OwnSetup, draw: Draw) -> OwnSetup:
    options = {
        **setup.options,
        "mode": "pipeline",
        "devices": 2,
        "microbatches": draw.choice((2, 2, 1, 4, 4, 8)),
        "schedule": draw.choice(PIPELINES),
        "recompute": draw.choice(("none", "none", "none", "all")),
    }
    if setup.variant == "whole_batch":
        options |= {"batch_norm": "whole_batch", "microbatches": 1}
    return replace(setup, options=options)


def _compiled(setup: OwnSetup, draw: Draw) -> OwnSetup:
    setup = _pipeline(setup, draw)
    return replace(setup, options={**setup.options, "compile_tasks": True})


def _ranks(setup: OwnSetup, draw: Draw) -> OwnSetup:
    ranks = Ranks(launch_of(setup.number), draw.choice(ORDERS))
    options = {**setup.options, "mode": "data_parallel", "schedule": ranks.schedule, "engine": ranks.engine}
    epochs = epochs_after(MEASURED, setup.rows, BATCH_SIZE, setup.steps_per_execution)
    return replace(setup, options=options, ranks=ranks, epochs=epochs)
