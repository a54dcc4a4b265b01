"""Replicas, pipelines, or replicas of pipelines: what ``devices=`` chooses beside what users can have."""

from __future__ import annotations

from benchmarks.case import NOBODY, OURS, PYTORCH, STOCK, Case, Way
from benchmarks.models import MESH

_MICROBATCHES = 8
# OOOBackprop(devices=...) stands for this.
AUTO = Way("auto", OURS, {"replicas": "auto", "fall_back": True, "recompute": "auto"})


def plain_replicas(devices: int) -> Way:
    """Return one model on each worker, each with its part of the batch whole."""
    return Way("replicas", STOCK, {"replicas": devices, "microbatches": devices})


def cases(quick: bool) -> tuple[Case, ...]:
    """Return ten models on 4 workers; ``quick``: one on 2."""
    if quick:
        return (_case("mlp_falling", 2, (*_in_all(2),), 6),)
    chosen = tuple(Way(f"{n} x {4 // n}", NOBODY, {"replicas": n}) for n in (1, 2, 4))
    return tuple(_case(network, 4, (*_in_all(4), *chosen), 12) for network in MESH)


def _in_all(devices: int) -> tuple[Way, ...]:
    return (
        AUTO,
        plain_replicas(devices),
        Way("one device", STOCK, {"stock": "one device"}),
        Way("1f1b", PYTORCH, {"schedule": "1f1b", "replicas": 1}),
        Way("interleaved_1f1b", PYTORCH, {"schedule": "interleaved_1f1b", "replicas": 1}),
    )


def _case(network: str, devices: int, ways: tuple[Way, ...], turns: int) -> Case:
    parameters = {
        "networks": "MESH", "model": network, "devices": devices, "microbatches": _MICROBATCHES
    }  # fmt: skip
    return Case(f"{network}, {devices} workers", "mesh", "workers", ways, parameters, turns)
