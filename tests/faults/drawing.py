"""A set-up from a number: modes and faults have their turn, all else is chance."""

from __future__ import annotations

import random

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

# A mode comes so often: those that compile, or that are made of others, less.
WEIGHTS = {
    "single": 3,
    "compiled": 1,
    "data_parallel": 4,
    "collectives": 2,
    "pipeline": 3,
    "pipeline_workers": 4,
    "replicas": 1,
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


def drawn(number: int, mode: str | None = None) -> Setup:
    """The set-up of that number, of that mode."""
    draw = random.Random(number)
    of_chance = draw.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
    name = mode or of_chance
    training = Training(name, draw.randrange(len(VARIANTS)), draw.choice(SAVINGS))
    return Setup(number, training, _fault(draw, training), draw.random() < 0.5)


def _fault(draw: random.Random, training: Training) -> Fault:
    mode = MODES[training.mode]
    kind = draw.choice(KINDS)
    target = draw.choice(_targets(kind, mode))
    if kind == "stop" and not (mode.ranks > 1 or mode.workers):
        kind = "pause"  # one process alone that is stopped for ever is what its user wanted
    seconds = draw.uniform(0.5, LONGEST_S) if kind in ("pause", "slow") else 0.0
    space = draw.randrange(LARGEST_BYTES) if kind in ("full_disk", "file_limit") else 0
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


def _when(draw: random.Random, kind: str, target: str, training: Training) -> Point | float:
    timed = draw.random() < 0.5
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
    return Point(where, draw.randint(1, calls.get(where, EPOCHS * STEPS)))
