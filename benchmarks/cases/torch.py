"""PyTorch's own pipelines beside ours, on one feed-forward network: compared by efficiency."""

from __future__ import annotations

from benchmarks.case import NOBODY, OURS, PYTORCH, Case, Way

# "in torch" is torch.distributed.pipelining itself; the others are our runs of the same schedules.
_WAYS = (
    Way("auto", OURS, {"schedule": "auto"}),
    Way("1f1b", NOBODY, {"schedule": "1f1b"}),
    Way("one device", NOBODY, {"stock": "one device"}),
    Way("torch serial", NOBODY, {"torch": "serial"}),
    *(
        Way(f"{name} in torch", PYTORCH, {"torch": name})
        for name in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv")
    ),
)


_LEFT_OUT_OF_QUICK = ("1f1b", "gpipe in torch", "interleaved_1f1b in torch", "zbv in torch")


def cases(quick: bool) -> tuple[Case, ...]:
    """Return 2 and 4 devices; ``quick``: 2 with fewer ways and micro-batches."""
    if quick:
        return (_case(2, 2, tuple(way for way in _WAYS if way.name not in _LEFT_OUT_OF_QUICK), 6),)
    return tuple(_case(devices, 2 * devices, _WAYS, 12) for devices in (2, 4))


def _case(devices: int, microbatches: int, ways: tuple[Way, ...], turns: int) -> Case:
    parameters = {
        "networks": "PIPELINE", "model": "feed_forward", "devices": devices, "microbatches": microbatches
    }  # fmt: skip
    return Case(f"feed_forward, {devices} devices", "torch", "torch", ways, parameters, turns)
