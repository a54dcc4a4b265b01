"""LayerPipe, whose gradients are late, beside PipeDream, PipeDream-2BW and synchronous pipelines."""

from __future__ import annotations

from benchmarks.case import OURS, PYTORCH, STOCK, Case, Way
from benchmarks.models import LAYERPIPE

_WAYS = (
    Way("auto", OURS, {"layerpipe": True}),
    # PyTorch's users have PipeDream's own code.
    Way("pipedream", PYTORCH, {"layerpipe": True, "schedule": "pipedream"}),
    # Two versions of the weights do for so many batches of an update, with up to five workers.
    Way("pipedream_2bw", PYTORCH, {"layerpipe": True, "schedule": "pipedream_2bw", "accumulate_steps": 8}),
    Way("1f1b", PYTORCH, {"schedule": "1f1b"}),
    # A baseline, too: it is what users of this package have whose gradients may not be late.
    Way("synchronous auto", STOCK, {"schedule": "auto"}),
    Way("one device", STOCK, {"stock": "one device"}),
)
# Steps of a turn that are timed together, after as many that fill rounds: several rounds may run as one.
_STEPS = 8


def cases(quick: bool) -> tuple[Case, ...]:
    """Return five networks on 2 and 3 workers; ``quick``: one on 2, with fewer ways."""
    if quick:
        ways = tuple(way for way in _WAYS if way.name not in ("pipedream_2bw", "1f1b"))
        return (_case("mlp", 2, ways, 6),)
    return tuple(_case(network, devices, _WAYS, 8) for devices in (2, 3) for network in LAYERPIPE)


def _case(network: str, devices: int, ways: tuple[Way, ...], turns: int) -> Case:
    parameters = {"networks": "LAYERPIPE", "model": network, "devices": devices, "steps": _STEPS}
    return Case(f"{network}, {devices} workers", "layerpipe", "workers", ways, parameters, turns)
