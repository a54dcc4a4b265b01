"""A set-up from a number: every kind of layer, optimizer and loss has its turn, all else is chance."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.fuzz.catalogue import (
    AVERAGES,
    CELLS,
    CLIPPING,
    JOINS,
    LAYERS,
    LEFT_OUT,
    LOSS_ARGUMENTS,
    LOSSES,
    METRICS,
    OFTEN,
    OPTIMIZERS,
    POLICIES,
    RANKS,
    RATE_SCHEDULES,
    REDUCTIONS,
    SCHEDULES,
    WORDS,
)
from tests.fuzz.setups import (
    Branch,
    Output,
    Part,
    Setup,
    Shared,
    Skip,
    Step,
    keeps_shape,
    rank_after,
    with_arguments,
    with_parts,
)
from tests.fuzz.several import as_pipelines, as_ranks
from tests.harness.drawing import Cases, Draw

INPUT_KINDS = {1: ("features",), 2: ("sequence", "tokens"), 3: ("image",), 4: ("volume",)}
SHAPES = {"features": (7,), "tokens": (4,), "sequence": (4, 5), "image": (6, 5, 3), "volume": (4, 3, 4, 2)}

# Each mode draws this beside the model.
MODES = {"single": lambda setup, _: setup, "pipeline": as_pipelines, "data_parallel": as_ranks}


@functools.cache
def cases(mode: str) -> Cases[Setup]:
    """The model of a number is the same in all modes."""
    return Cases(lambda draw: MODES[mode](setup_of(draw), draw))


@functools.cache
def drawn(number: int, mode: str = "single") -> Setup:
    return cases(mode).drawn(number)


def setup_of(draw: Draw) -> Setup:
    setup = Setup(
        number=draw.number,
        branches=branches_of(draw, draw.in_turn(tuple(LAYERS))),
        join=draw.in_turn(JOINS),
        trunk=trunk_of(draw),
        outputs=outputs_of(draw),
        optimizer=optimizer_of(draw, draw.in_turn(tuple(OPTIMIZERS))),
        policy=draw.choice(POLICIES),
        schedule=draw.choice(SCHEDULES),
        profile_steps=2 if draw.chance(0.05) else 0,
        steps_per_execution=draw.choice((1, 1, 2, 3)),
        rows=draw.choice((16, 14)),
        epochs=draw.choice((1, 1, 1, 2)),
        sample_weights=draw.chance(0.2),
    )
    return without_unsupported(setup)


def arguments_of(draw: Draw, choices: Mapping[str, tuple[Any, ...]]) -> tuple[tuple[str, Any], ...]:
    drawn = {name: draw.choice(values) for name, values in choices.items()}
    return tuple((name, value) for name, value in drawn.items() if value is not LEFT_OUT)


def layer_of(draw: Draw, name: str) -> Part:
    """A layer of that class; as a part of Keras, not of anything around it."""
    kind = LAYERS[name]
    arguments = arguments_of(draw, kind.choices)
    if kind.cells:
        first = draw.choice(kind.cells)
        names = (first, draw.choice([other for other in kind.cells if other != first]))
        cells = tuple(Part(f"layers.{cell}", arguments_of(draw, CELLS[cell])) for cell in names)
        arguments = (("cell", cells), *arguments)
    if kind.wraps:
        arguments = (("layer", layer_of(draw, draw.choice(kind.wraps))), *arguments)
    return Part(f"layers.{name}", _without_conflicts(name, arguments))


def step_of(draw: Draw, rank: int, wanted: str, first: bool = False) -> Step:
    names = [name for name, kind in LAYERS.items() if rank in kind.ranks]
    often = [name for name in OFTEN if name in names]
    layer = layer_of(draw, wanted or draw.choice(names if draw.chance(0.5) else often))
    if not first:  # something is left of the shape
        layer = with_arguments(layer, padding=lambda value: "same" if value == "valid" else value)
    if rank_after(layer, rank) != rank or not keeps_shape(layer) or not draw.chance(0.25):
        return layer
    if layer.kind == "layers.Dense" and draw.chance(0.5):
        return Shared(layer)
    return Skip(draw.choice(JOINS), (layer,))


def steps_of(draw: Draw, rank: int, wanted: str) -> tuple[Step, ...]:
    """One or two steps for tensors of that rank, one of them with the wanted class if there is one."""
    count = draw.choice((1, 1, 2))
    place = draw.below(count) if wanted else -1
    steps: list[Step] = []
    for number in range(count):
        is_wanted = number == place and rank in LAYERS[wanted].ranks
        steps.append(step_of(draw, rank, wanted if is_wanted else "", first=not number))
        rank = rank_after(steps[-1], rank) or rank
    return tuple(steps)


def branches_of(draw: Draw, wanted: str) -> tuple[Branch, ...]:
    """One or two inputs; the first has a layer of the wanted class."""
    first = branch_of(draw, draw.choice(LAYERS[wanted].ranks), wanted)
    return (first, branch_of(draw, draw.choice((1, 2, 3)))) if draw.chance(0.2) else (first,)


def branch_of(draw: Draw, rank: int, wanted: str = "") -> Branch:
    kind = draw.choice(INPUT_KINDS[rank])
    steps = steps_of(draw, RANKS[kind], wanted)
    while wanted and not any(f"layers.{wanted}" in repr(step) for step in steps):
        steps = steps_of(draw, RANKS[kind], wanted)
    embedding = embedding_of(draw) if kind == "tokens" else None
    if embedding is not None and "layers.Softmax" in repr(steps):  # Keras' does not take such a mask
        embedding = with_arguments(embedding, mask_zero=lambda value: LEFT_OUT)
    return Branch(kind, SHAPES[kind], steps, draw.choice(REDUCTIONS), embedding)


def embedding_of(draw: Draw) -> Part:
    choices = {
        "output_dim": (4, 6),
        "mask_zero": (LEFT_OUT, True),
        "trainable": (LEFT_OUT,) * 7 + (False,),
    }
    return Part("layers.Embedding", (("input_dim", WORDS), *arguments_of(draw, choices)))


def trunk_of(draw: Draw) -> tuple[Step, ...]:
    names = ("Dense", "Dense", "BatchNormalization", "Dropout")
    return tuple(step_of(draw, 1, draw.choice(names)) for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 2))))


def outputs_of(draw: Draw) -> tuple[Output, ...]:
    several = draw.chance(0.2)
    return tuple(output_of(draw, turn, several) for turn in range(2 if several else 1))


def output_of(draw: Draw, turn: int, several: bool) -> Output:
    name = draw.choice(tuple(LOSSES)) if turn else draw.in_turn(tuple(LOSSES))
    arguments = arguments_of(draw, LOSS_ARGUMENTS.get(name, {}))
    metrics = [metric for metric in METRICS[LOSSES[name]] if draw.chance(0.2)]
    weight = draw.choice((None, 0.3, 1.5)) if several else None
    return Output(3, Part(f"keras.losses.{name}", arguments), weight, tuple(metrics))


def optimizer_of(draw: Draw, name: str) -> Part:
    arguments = dict(arguments_of(draw, {**OPTIMIZERS[name], **CLIPPING, **AVERAGES}))
    clippings = [name for name in CLIPPING if name in arguments]
    for clipping in clippings[1:]:
        del arguments[clipping]
    rate: Any = 0.02
    if draw.chance(0.15) and name != "ScheduleFreeAdamW":
        kind = draw.choice(tuple(RATE_SCHEDULES))
        rate = Part(f"keras.optimizers.schedules.{kind}", arguments_of(draw, RATE_SCHEDULES[kind]))
    return Part(f"keras.optimizers.{name}", (("learning_rate", rate), *arguments.items()))


def without_unsupported(setup: Setup) -> Setup:
    """Without what stock TensorFlow 2.21 or Keras 3.15 fails at."""
    if _fails_in(setup.policy, setup.optimizer.kind, {part.kind for part in setup.parts()}):
        setup = replace(setup, policy="float32")
    if any(branch.embedding for branch in setup.branches):
        # It divides gradients, which those of an Embedding (IndexedSlices) do not support.
        optimizer = with_arguments(setup.optimizer, loss_scale_factor=lambda value: LEFT_OUT)
        setup = replace(setup, optimizer=optimizer)
    return without_penalties_of_another_type(setup)


def _fails_in(policy: str, optimizer: str, layers: set[str]) -> bool:
    if optimizer == "keras.optimizers.Nadam" and policy == "mixed_float16":
        return True  # its product of decays is no variable behind a scaled loss: it is not set back
    if optimizer == "keras.optimizers.Muon" and policy == "float64":
        return True  # it multiplies with a float32 square root
    # On a CPU the largest of a volume has kernels for float32 and bfloat16.
    return "layers.MaxPooling3D" in layers and policy in ("mixed_float16", "float64")


def without_penalties_of_another_type(setup: Setup) -> Setup:
    """Losses are float32, and a penalty of another type cannot be added to them."""
    if setup.policy == "float32":
        return setup
    names = {name for part in setup.parts() for name, _ in part.arguments if name.endswith("_regularizer")}
    if setup.policy != "float64":
        names &= {"activity_regularizer"}

    def change(part: Part) -> Part:
        if part.kind == "layers.ActivityRegularization":
            return Part("layers.Dropout", (("rate", 0.1), ("seed", 1)))
        return with_arguments(part, **{name: lambda value: LEFT_OUT for name in names})

    return with_parts(setup, change)


def _without_conflicts(name: str, arguments: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Leave out what Keras or TensorFlow refuses together."""
    values = dict(arguments)
    if name == "DepthwiseConv2D" and values.get("strides") == 2:
        values["padding"] = "same"
    if name == "Bidirectional":  # sets it itself
        values["layer"] = with_arguments(values["layer"], go_backwards=lambda value: LEFT_OUT)
    if name in ("Attention", "AdditiveAttention") and "dropout" not in values:
        values.pop("seed", None)
    return tuple(values.items())
