"""How set-ups run on several devices: what is drawn beside the model, and what a model needs for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.fuzz.setups import Part, Pipeline, Setup
from tf_ooo.planning.policies import schedules_of

if TYPE_CHECKING:
    from tests.fuzz.drawing import Drawing

MOST_DEVICES = 4
SCHEDULES = ("auto", *schedules_of("pipeline"))


def as_pipelines(setup: Setup, draw: Drawing) -> Setup:
    """Two schedules, each on devices of its own number; with layers enough for both."""
    first = draw.in_turn(SCHEDULES)
    second = draw.choice([name for name in SCHEDULES if name != first])
    pipelines = (_pipeline(first, draw), _pipeline(second, draw))
    setup = replace(setup, pipelines=pipelines, microbatches=draw.choice((1, 2, 2, 3, 4)))
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
    )


def _deep_enough(setup: Setup, layers: int) -> Setup:
    """With more dense layers before the outputs, where it has fewer than so many that train."""
    dense = Part("layers.Dense", (("units", 5), ("activation", "tanh")))
    return replace(setup, trunk=(*setup.trunk, *[dense] * (layers - setup.trained_layers())))
