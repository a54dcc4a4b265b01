"""Schedules of a pipeline: those of PyTorch and ours, from the same costs, on workers that compute."""

from __future__ import annotations

from benchmarks.case import NOBODY, OURS, PYTORCH, STOCK, Case, Way
from benchmarks.models import PIPELINE

_WAYS = (
    Way("auto", OURS, {"schedule": "auto"}),
    Way("gpipe", PYTORCH, {"schedule": "gpipe"}),
    Way("1f1b", PYTORCH, {"schedule": "1f1b"}),
    # With as many stages on each worker as are predicted to be best.
    Way("interleaved_1f1b", PYTORCH, {"schedule": "interleaved_1f1b"}),
    Way("zb_interleaved", PYTORCH, {"schedule": "zb_interleaved"}),
    Way("zb_v", PYTORCH, {"schedule": "zb_v"}),
    Way("dualpipe_v", PYTORCH, {"schedule": "dualpipe_v"}),
    Way("one device", STOCK, {"stock": "one device"}),
    Way("1f1b_unfused", NOBODY, {"unfused": "1f1b"}),
    Way("interleaved_1f1b_unfused", NOBODY, {"unfused": "interleaved_1f1b"}),
)
_IN_QUICK = ("auto", "gpipe", "1f1b", "interleaved_1f1b", "one device")


def cases(quick: bool) -> tuple[Case, ...]:
    """Return five networks on 4 workers; ``quick``: a small one on 2, with fewer ways."""
    if quick:
        ways = tuple(way for way in _WAYS if way.name in _IN_QUICK)
        return (_case("MESH", "mlp_even", 2, 4, ways, 6),)
    return tuple(_case("PIPELINE", network, 4, 8, _WAYS, 12) for network in PIPELINE)


def _case(
    networks: str, network: str, devices: int, microbatches: int, ways: tuple[Way, ...], turns: int
) -> Case:
    parameters = {
        "networks": networks, "model": network, "devices": devices, "microbatches": microbatches
    }  # fmt: skip
    name = f"{network}, {devices} workers, {microbatches} micro-batches"
    return Case(name, "pipeline", "workers", ways, parameters, turns)
