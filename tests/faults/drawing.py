"""A set-up from a number: modes and faults have their turn, all else is chance."""

from __future__ import annotations

import functools

from tests.faults.setups import (
    ALL,
    EPOCHS,
    FIRST,
    MODES,
    SAVINGS,
    SECOND,
    STEPS,
    VARIANTS,
    WORKER,
    Fault,
    Mode,
    Point,
    Setup,
    Training,
)
from tests.harness.drawing import Cases, Draw

# A mode comes so often: those that compile, or that are made of others, less.
WEIGHTS = {
    "single": 3,
    "compiled": 1,
    "data_parallel": 4,
    "collectives": 2,
    "pipeline": 3,
    "pipeline_workers": 4,
    "replicas": 1,
    "compiled_pipeline": 1,
    "compiled_workers": 1,
    "compiled_ranks": 1,
    "layerpipe": 2,
    "layerpipe_workers": 2,
}
KINDS = (
    *("kill", "terminate", "interrupt", "stop", "pause", "exception"),
    *("slow", "full_disk", "file_limit"),
)
# A file may be so large, and a disk has so much left: no checkpoint is so small, none larger than this.
LARGEST_BYTES = 60_000
LONGEST_S = 6.0


@functools.cache
def cases(mode: str) -> Cases[Setup]:
    """Cases have the mode of that name, or any mode where the name is empty."""
    return Cases(lambda draw: _setup_of(draw, mode))


def drawn(number: int, mode: str = "") -> Setup:
    return cases(mode).drawn(number)


def _setup_of(draw: Draw, mode: str) -> Setup:
    of_chance = draw.choice([name for name, weight in WEIGHTS.items() for _ in range(weight)])
    training = Training(mode or of_chance, draw.below(len(VARIANTS)), draw.choice(SAVINGS))
    return Setup(draw.number, training, _fault(draw, training), draw.chance(0.5))


def _fault(draw: Draw, training: Training) -> Fault:
    mode = MODES[training.mode]
    kind = draw.choice(KINDS)
    target = draw.choice(_targets(kind, mode))
    if kind == "stop" and not (mode.ranks > 1 or mode.workers):
        kind = "pause"  # one process alone that is stopped for ever is what its user wanted
    seconds = draw.uniform(0.5, LONGEST_S) if kind in ("pause", "slow") else 0.0
    space = draw.below(LARGEST_BYTES) if kind in ("full_disk", "file_limit") else 0
    return Fault(kind, target, _when(draw, kind, target, training), seconds, space)


def _targets(kind: str, mode: Mode) -> tuple[str, ...]:
    if kind == "full_disk":
        return (FIRST,)  # which saves
    ranks = (FIRST, SECOND) if mode.ranks > 1 else (FIRST,)
    if kind in ("exception", "slow", "file_limit"):
        return ranks
    workers = (WORKER,) if mode.workers else ()
    if kind == "stop" and workers:
        return workers
    return (*ranks, *workers, ALL) if kind == "interrupt" and mode.ranks > 1 else (*ranks, *workers)


def _when(draw: Draw, kind: str, target: str, training: Training) -> Point | float:
    timed = draw.chance(0.5)
    if target == ALL or (timed and kind not in ("exception", "slow", "file_limit")):
        return draw.uniform(0.02, 0.98)
    saves = target != SECOND
    has_data = VARIANTS[training.variant][1] != "arrays" and kind in ("exception", "slow")
    where = draw.choice(
        (
            *("train_batch_begin", "train_batch_end", "epoch_begin", "epoch_end", "train_end"),
            *(("saving",) * 3 if saves else ()),
            *(("data",) * 2 if has_data else ()),
        )
    )
    calls = {"train_end": 1, "epoch_begin": EPOCHS, "epoch_end": EPOCHS, "saving": EPOCHS}
    return Point(where, 1 + draw.below(calls.get(where, EPOCHS * STEPS)))
