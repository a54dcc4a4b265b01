"""Data parallel training of two ranks beside stock Horovod, tuned Horovod and TensorFlow's own strategy."""

from __future__ import annotations

from benchmarks.case import NOBODY, OURS, STOCK, Case, Way
from benchmarks.runners.horovod_rank import APPLY, CALLBACK, LOCAL, STRATEGY, TAPE

# By their models, how many steps go into one execution.
_STEPS = {"mlp": 8, "vgg16": 8, "mlp_deep": 8, "bert": 4, "resnet50": 4}
# How many times as long as computing communicating is to take; None: no limit.
_LINKS = (0.7, 1.0, 1.3, None)
# Horovod's settings that were the best of several in all runs before, and its own search.
_TUNED = {
    "cycle 1 ms, fusion 2 MiB": {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "2097152"},
    "cycle 1 ms, fusion 8 MiB": {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "8388608"},
    "autotune": {"HOROVOD_AUTOTUNE": "1"},
}


def cases(quick: bool) -> tuple[Case, ...]:
    """Return each model on each link; ``quick``: a small one on one link."""
    if quick:
        return (_case("mlp_small", 1.0, 8, list(_TUNED)[1:2], 6),)
    return tuple(
        _case(model, link, steps, list(_TUNED), 8) for model, steps in _STEPS.items() for link in _LINKS
    )


def _case(model: str, link: float | None, steps: int, tuned: list[str], turns: int) -> Case:
    """Return the case; its first way is what weights are compared with."""
    said = "no limit of the link" if link is None else f"communicating takes {link:g} of computing"
    parameters = {"model": model, "communication": link, "steps": steps, "cores": 0.5}
    return Case(f"{model}, {said}", "data_parallel", "horovod", _ways(tuned), parameters, turns)


def _ways(tuned: list[str]) -> tuple[Way, ...]:
    several = {"together": True}
    nothing_reordered = {"schedule": "reverse_first_k", "k": 0, "profile_steps": 0}
    # The fits of a benchmark are too short to pay for a comparison: it is asked for.
    auto = {"profile_steps": 2, "compare": True}
    return (
        Way("horovod", STOCK, {"kind": APPLY, "together": False}),
        Way("horovod_k", STOCK, {"kind": APPLY, **several}),
        Way("horovod_tape_k", STOCK, {"kind": TAPE, **several}),
        *(
            Way(f"horovod_k, {name}", STOCK, {"kind": APPLY, **several, "knobs": _TUNED[name]})
            for name in tuned
        ),
        Way("multi_worker_k", STOCK, {"kind": STRATEGY, **several}),
        Way("reverse_first_k k=0", NOBODY, {"kind": CALLBACK, **several, "callback": nothing_reordered}),
        Way("auto", OURS, {"kind": CALLBACK, **several, "callback": auto}),
        Way("local", NOBODY, {"kind": LOCAL, **several}),
    )
