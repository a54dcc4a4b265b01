"""Workers of which one is slow: plans for measured speeds beside those for workers that are all alike."""

from __future__ import annotations

from benchmarks.case import OURS, PYTORCH, STOCK, Case, Way
from benchmarks.cases.meshes import AUTO, plain_replicas

_NETWORKS = ("mlp_even", "resnet", "transformer", "gpt2")
_SLOW = 0.5  # the last worker's part of the others' CPU


def cases(quick: bool) -> tuple[Case, ...]:
    """Return four models on three workers; ``quick``: one on two."""
    if quick:
        return (_case("mlp_even", 2, 6),)
    return tuple(_case(network, 3, 12) for network in _NETWORKS)


def _case(network: str, devices: int, turns: int) -> Case:
    ways = (
        Way("auto", OURS, AUTO.options),
        Way("1f1b", PYTORCH, {"schedule": "1f1b", "alike": True}),
        Way("interleaved_1f1b", PYTORCH, {"schedule": "interleaved_1f1b", "alike": True}),
        plain_replicas(devices),
        Way("one device", STOCK, {"stock": "one device"}),
    )
    parameters = {
        "networks": "MESH", "model": network, "devices": devices, "microbatches": 3 * devices,
        "slow": _SLOW,
    }  # fmt: skip
    return Case(f"{network}, {devices} workers, one slow", "unequal", "workers", ways, parameters, turns)
