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


def cases(quick: bool) -> tuple[Case, ...]:
    """Return 4 devices with 8 micro-batches and 2 with 4; ``quick``: the smaller one."""
    return tuple(_case(devices, 6 if quick else 12) for devices in ((2,) if quick else (2, 4)))


def _case(devices: int, turns: int) -> Case:
    parameters = {
        "networks": "PIPELINE", "model": "feed_forward", "devices": devices, "microbatches": 2 * devices
    }  # fmt: skip
    return Case(f"feed_forward, {devices} devices", "torch", "torch", _WAYS, parameters, turns)
