"""Draws set-ups for several devices: what is drawn beside the model, and what a model needs for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.fuzz.catalogue import BATCH_SIZE
from tests.fuzz.setups import Part, Pipeline, Ranks, Setup
from tf_ooo.planning.policies import schedules_of

if TYPE_CHECKING:
    from tests.fuzz.drawing import Drawing

MOST_DEVICES = 4
SCHEDULES = ("auto", *schedules_of("pipeline"))
# Two ranks are started like this, with variables that say more of it; so many numbers in a row by each.
LAUNCHES = {"horovod": {}, "unfused": {"HOROVOD_FUSION_THRESHOLD": "0"}, "collectives": {}}
IN_A_ROW = 10
ORDERS = ("reverse_first_k", "reverse_first_k", "fast_forward", "fast_forward", "in_order", "search", "auto")
# Single steps before a plan that needs costs, at most.
MEASURED = 6


def as_pipelines(setup: Setup, draw: Drawing) -> Setup:
    """Two schedules, each on devices of its own number; with layers enough for both."""
    first = draw.in_turn(SCHEDULES)
    second = draw.choice([name for name in SCHEDULES if name != first])
    pipelines = (_pipeline(first, draw), _pipeline(second, draw))
    microbatches = draw.choice((1, 2, 2, 3, 4))
    if draw.choice((False, False, True)):  # the same number, or gradients are added up in another order
        pipelines = tuple(_replicated(pipeline) for pipeline in pipelines)
        microbatches = max(2, microbatches)
    setup = replace(setup, pipelines=pipelines, microbatches=microbatches)
    return _deep_enough(setup, max(pipeline.layers for pipeline in pipelines))


def _pipeline(schedule: str, draw: Drawing) -> Pipeline:
    devices = draw.choice((2, 2, 3, MOST_DEVICES))
    chunks = draw.choice((None, 2, 3) if devices == 2 else (None, 2))
    group = draw.choice((None, 1, 2))
    return Pipeline(
        schedule,
        devices,
        profile_steps=draw.choice((0, 0, 0, 0, 0, 1, 2)),
        chunks=chunks if schedule == "interleaved_1f1b" else None,
        group=group if schedule == "modulo" else None,
        recompute=draw.choice(("none", "none", "all")),
    )


def _replicated(pipeline: Pipeline) -> Pipeline:
    """Two, of one device each or of two."""
    return replace(pipeline, replicas=2, devices=2 if pipeline.devices == 2 else MOST_DEVICES)


def _deep_enough(setup: Setup, layers: int) -> Setup:
    """With more dense layers before the outputs, where it has fewer than so many that train."""
    dense = Part("layers.Dense", (("units", 5), ("activation", "tanh")))
    return replace(setup, trunk=(*setup.trunk, *[dense] * (layers - setup.trained_layers())))


def as_ranks(setup: Setup, draw: Drawing) -> Setup:
    """With options of data parallel, and steps enough for a plan and for some in its order."""
    launch = tuple(LAUNCHES)[setup.number // IN_A_ROW % len(LAUNCHES)]
    schedule = draw.choice(ORDERS)
    op = draw.choice(("Average", "Average", "Average", "Sum"))
    ranks = Ranks(
        launch,
        schedule,
        k=draw.choice((None, 0, 1, 2, 3)) if schedule == "reverse_first_k" else None,
        unroll=draw.choice((None, None, 1, 2)),
        op=op,
        # Horovod adds and divides in 16 bits, TensorFlow's collectives add in 16 and divide in 32.
        compression=draw.choice(("none", "fp16")) if launch != "collectives" else "none",
        weighting=draw.choice(("ranks", "samples")) if op == "Average" else "ranks",
        lockstep=draw.choice(("auto", "epoch", "execution")),
    )
    setup = replace(setup, ranks=ranks, steps_per_execution=draw.choice((1, 2, 2, 3, 4)))
    return replace(setup, profile_steps=draw.choice((0, 0, 1)), epochs=_epochs(setup))


def _epochs(setup: Setup) -> int:
    """So that executions are left after those before the plan: two in either order, one that is timed."""
    assert setup.ranks
    by_costs = setup.ranks.schedule in ("search", "auto", "reverse_first_k") and setup.ranks.k is None
    first = -(-MEASURED // setup.steps_per_execution) if by_costs else 1
    of_epoch = -(-setup.rows // (BATCH_SIZE * setup.steps_per_execution))
    return max(setup.epochs, -(-(first + 4) // of_epoch))
