"""Pipelines on emulated devices: what a plan promises, with TensorFlow's own overhead and nothing else."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.case import NOBODY, OURS, PYTORCH, Case, Way

WAYS = (
    Way("gpipe", PYTORCH, {"schedule": "gpipe"}),
    Way("1f1b", PYTORCH, {"schedule": "1f1b"}),
    Way("interleaved_1f1b", PYTORCH, {"schedule": "interleaved_1f1b", "chunked": True}),
    Way("zb_interleaved", PYTORCH, {"torch": "interleaved_zero_bubble", "chunked": True}),
    Way("zb_v", PYTORCH, {"torch": "zbv"}),
    Way("dualpipe_v", PYTORCH, {"schedule": "dualpipe_v", "least_microbatches": 2}),
    Way("1f1b_unfused", NOBODY, {"schedule": "1f1b", "unfused": True}),
    Way(
        "interleaved_1f1b_unfused",
        NOBODY,
        {"schedule": "interleaved_1f1b", "chunked": True, "unfused": True},
    ),
    Way("auto", OURS, {"auto": True}),
)
# Seconds of a message, which plans count with: what the product assumes within a process, and about what it
# measures between two processes of one machine.
_WITHIN_S, _BETWEEN_S = 30e-6, 0.5e-3


# A turn of these takes a second.
_QUICK_TURNS = 8


def case(
    model: str, devices: int, task_ms: float | None, layers: int, microbatches: int, processes: bool = False
) -> Case:
    """Return one setting; ``task_ms``: of all F of a device on average, None: the model says it."""
    length = "" if task_ms is None else f", {task_ms:g} ms"
    workers = " in processes" if processes else ""
    return Case(
        f"{model}, {layers} layers, {microbatches} micro-batches, {devices} devices{workers}{length}",
        "emulated",
        "emulated",
        WAYS,
        {
            "model": model,
            "layers": layers,
            "devices": devices,
            "microbatches": microbatches,
            "task_s": None if task_ms is None else task_ms / 1e3,
            "latency_s": _BETWEEN_S if processes else _WITHIN_S,
            "processes": processes,
        },
    )


def cases(quick: bool) -> tuple[Case, ...]:
    """Models of equal and unequal layers, as many micro-batches as devices, and twice as many."""
    if quick:
        few = (
            case("gpt", 4, 5, 8, 4),
            case("unet", 4, 5, 8, 4),
            case("equal", 4, 5, 8, 8),
            case("equal", 4, 20, 8, 4, processes=True),
        )
        return tuple(replace(one, turns=_QUICK_TURNS) for one in few)
    models = ("equal", "gpt", "unet")
    return (
        *(
            case(model, devices, task_ms, 2 * devices, devices)
            for model in models
            for devices in (4, 8)
            for task_ms in (2, 5, 20)
        ),
        *(case(model, 4, 5, 16, 8) for model in models),
        case("equal", 16, 5, 32, 16),
        case("bert_large", 8, None, 25, 8),
        case("gpt2", 8, None, 25, 8),
        *(case(model, 4, task_ms, 8, 4, processes=True) for model in models for task_ms in (5, 20)),
    )
