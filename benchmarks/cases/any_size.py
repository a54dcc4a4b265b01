"""A transformer whose weights and slots are about twice what one worker may use."""

from __future__ import annotations

from benchmarks.case import NOBODY, OURS, STOCK, Case, Way

# The first has what nobody has in this case, a machine that is large enough: weights are compared with it.
_WAYS = (
    Way("stock fit, no limit", NOBODY, {"workers": 0, "limited": False}),
    Way("auto", OURS, {"workers": 4, "limited": True}),
    Way("stock fit", STOCK, {"workers": 0, "limited": True}),
)


def cases(quick: bool) -> tuple[Case, ...]:
    """Return one case; ``quick``: a small transformer."""
    size = (
        {"layers": 8, "width": 256, "limit_mb": 600}
        if quick
        else {"layers": 12, "width": 1600, "limit_mb": 2300}
    )
    name = f"gpt2 of {size['layers']} layers, {size['width']} wide, {size['limit_mb']} MB for a worker"
    steps = 6 if quick else 8
    return (Case(name, "any_size", "limited_memory", _WAYS, {**size, "steps": steps}, steps),)
