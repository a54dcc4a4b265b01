"""One CPU device: does the order of the backward pass gain anything, and what does ours cost?"""

from __future__ import annotations

from benchmarks.case import NOBODY, OURS, STOCK, Case, Way
from benchmarks.models import ONE_CPU

# Users may name an order; without a word they have `auto`, which compares none on one CPU device.
_WAYS = (
    Way("stock fit", STOCK, {"stock": True}),
    Way("auto", OURS),
    Way("fast_forward", NOBODY, {"schedule": "fast_forward", "profile_steps": 0}),
    Way("in_order", NOBODY, {"schedule": "in_order", "profile_steps": 0}),
)


def cases(quick: bool) -> tuple[Case, ...]:
    """Return one case for each network; ``quick``: the smallest one, in short fits."""
    models, steps, turns = (["mlp"], 10, 6) if quick else (list(ONE_CPU), 20, 12)
    return tuple(
        Case(model, "one_cpu", "one_process", _WAYS, {"model": model, "steps": steps}, turns)
        for model in models
    )
