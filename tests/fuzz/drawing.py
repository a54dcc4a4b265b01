"""A set-up from a number: every kind of layer, optimizer and loss has its turn, all else is chance."""

from __future__ import annotations

import random
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
from tests.fuzz.changes import with_arguments, with_parts
from tests.fuzz.setups import Branch, Output, Part, Setup, Shared, Skip, Step, keeps_shape, rank_after
from tests.fuzz.several import as_pipelines, as_ranks

INPUT_KINDS = {1: ("features",), 2: ("tokens", "sequence"), 3: ("image",), 4: ("volume",)}
SHAPES = {"features": (7,), "tokens": (4,), "sequence": (4, 5), "image": (6, 5, 3), "volume": (4, 3, 4, 2)}

# Each mode draws this beside the model.
MODES = {"single": lambda setup, _: setup, "pipeline": as_pipelines, "data_parallel": as_ranks}


def drawn(number: int, mode: str = "single") -> Setup:
    """The set-up of that number; the model of one is the same in all modes."""
    draw = Drawing(number)
    wanted = draw.in_turn(tuple(LAYERS))
    setup = Setup(
        number=number,
        branches=draw.branches(wanted),
        join=draw.in_turn(JOINS),
        trunk=draw.trunk(),
        outputs=draw.outputs(),
        optimizer=draw.optimizer(draw.in_turn(tuple(OPTIMIZERS))),
        policy=draw.choice(POLICIES),
        schedule=draw.choice(SCHEDULES),
        profile_steps=2 if draw.chance(0.05) else 0,
        steps_per_execution=draw.choice((1, 1, 2, 3)),
        rows=draw.choice((14, 16)),
        epochs=draw.choice((1, 1, 1, 2)),
        sample_weights=draw.chance(0.2),
    )
    setup = without_unsupported(setup)
    return MODES[mode](setup, draw)


class Drawing:
    """Chance, from a number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.random = random.Random(number)

    def choice(self, values: Any) -> Any:
        return self.random.choice(values)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def in_turn(self, values: tuple[Any, ...]) -> Any:
        """Each of the values once in as many numbers, in an order of chance, another every time."""
        turn, place = divmod(self.number, len(values))
        return random.Random(f"{turn} {values}").sample(values, len(values))[place]

    def arguments(self, choices: Mapping[str, tuple[Any, ...]]) -> tuple[tuple[str, Any], ...]:
        drawn = {name: self.choice(values) for name, values in choices.items()}
        return tuple((name, value) for name, value in drawn.items() if value is not LEFT_OUT)

    def layer(self, name: str) -> Part:
        """A layer of that class; as a part of Keras, not of anything around it."""
        kind = LAYERS[name]
        arguments = self.arguments(kind.choices)
        if kind.cells:
            names = self.random.sample(kind.cells, len(kind.cells))
            cells = tuple(Part(f"layers.{name}", self.arguments(CELLS[name])) for name in names)
            arguments = (("cell", cells[:2]), *arguments)  # a third takes as long as a set-up
        if kind.wraps:
            arguments = (("layer", self.layer(self.choice(kind.wraps))), *arguments)
        return Part(f"layers.{name}", _without_conflicts(name, arguments))

    def steps(self, rank: int, count: int, wanted: str = "") -> tuple[tuple[Step, ...], int]:
        """So many steps for tensors of that rank, one of them with the wanted class; the rank after them."""
        place = self.random.randrange(count) if wanted else -1
        steps: list[Step] = []
        for number in range(count):
            if number == place and rank not in LAYERS[wanted].ranks:
                break
            step = self.step(rank, wanted if number == place else "", first=not number)
            steps.append(step)
            rank = rank_after(step, rank) or rank
        return tuple(steps), rank

    def step(self, rank: int, wanted: str, first: bool = False) -> Step:
        names = [name for name, kind in LAYERS.items() if rank in kind.ranks]
        often = [name for name in OFTEN if name in names]
        layer = self.layer(wanted or self.choice(often if self.chance(0.5) else names))
        if not first:  # something is left of the shape
            layer = with_arguments(layer, padding=lambda value: "same" if value == "valid" else value)
        if rank_after(layer, rank) != rank or not keeps_shape(layer) or not self.chance(0.25):
            return layer
        if layer.kind == "layers.Dense" and self.chance(0.5):
            return Shared(layer)
        return Skip(self.choice(JOINS), (layer,))

    def branches(self, wanted: str) -> tuple[Branch, ...]:
        """One or two inputs; the first has a layer of the wanted class."""
        first = self.branch(self.choice(LAYERS[wanted].ranks), wanted)
        if not self.chance(0.2):
            return (first,)
        return first, self.branch(self.choice((1, 2, 3)))

    def branch(self, rank: int, wanted: str = "") -> Branch:
        kind = self.choice(INPUT_KINDS[rank])
        while True:
            steps, _ = self.steps(RANKS[kind], self.choice((1, 1, 2)), wanted)
            if not wanted or any(f"layers.{wanted}" in repr(step) for step in steps):
                break
        embedding = self.embedding() if kind == "tokens" else None
        if embedding is not None and "layers.Softmax" in repr(steps):  # Keras' does not take such a mask
            arguments = tuple(pair for pair in embedding.arguments if pair[0] != "mask_zero")
            embedding = replace(embedding, arguments=arguments)
        return Branch(kind, SHAPES[kind], steps, self.choice(REDUCTIONS), embedding)

    def embedding(self) -> Part:
        choices = {
            "output_dim": (4, 6),
            "mask_zero": (LEFT_OUT, True),
            "trainable": (LEFT_OUT,) * 7 + (False,),
        }
        return Part("layers.Embedding", (("input_dim", WORDS), *self.arguments(choices)))

    def trunk(self) -> tuple[Step, ...]:
        steps = []
        for _ in range(self.choice((1, 1, 2))):
            step = self.step(1, self.choice(("Dense", "Dense", "BatchNormalization", "Dropout")))
            steps.append(step)
        return tuple(steps)

    def outputs(self) -> tuple[Output, ...]:
        several = self.chance(0.2)
        return tuple(self.output(turn, several) for turn in range(2 if several else 1))

    def output(self, turn: int, several: bool) -> Output:
        name = self.in_turn(tuple(LOSSES)) if not turn else self.choice(tuple(LOSSES))
        arguments = self.arguments(LOSS_ARGUMENTS.get(name, {}))
        metrics = [metric for metric in METRICS[LOSSES[name]] if self.chance(0.2)]
        weight = self.choice((None, 0.3, 1.5)) if several else None
        return Output(3, Part(f"keras.losses.{name}", arguments), weight, tuple(metrics))

    def optimizer(self, name: str) -> Part:
        arguments = dict(self.arguments({**OPTIMIZERS[name], **CLIPPING, **AVERAGES}))
        clippings = [name for name in CLIPPING if name in arguments]
        for clipping in clippings[1:]:
            del arguments[clipping]
        rate: Any = 0.02
        if self.chance(0.15) and name != "ScheduleFreeAdamW":
            kind = self.choice(tuple(RATE_SCHEDULES))
            rate = Part(f"keras.optimizers.schedules.{kind}", self.arguments(RATE_SCHEDULES[kind]))
        return Part(f"keras.optimizers.{name}", (("learning_rate", rate), *arguments.items()))


def without_unsupported(setup: Setup) -> Setup:
    """Without what stock TensorFlow 2.21 or Keras 3.15 fails at."""
    setup = without_unlisted_state(setup)
    setup = without_muon_in_float64(without_pooled_volumes_of_other_types(setup))
    return without_penalties_of_another_type(without_scaled_sparse_gradients(setup))


def without_unlisted_state(setup: Setup) -> Setup:
    """Behind a scaled loss Nadam's product of decays is no variable of the optimizer: it is not set back."""
    nadam = setup.optimizer.kind == "keras.optimizers.Nadam"
    return replace(setup, policy="float32") if nadam and setup.policy == "mixed_float16" else setup


def without_pooled_volumes_of_other_types(setup: Setup) -> Setup:
    """On a CPU the largest of a volume has kernels for float32 and bfloat16."""
    volumes = any(part.kind == "layers.MaxPooling3D" for part in setup.parts())
    lacks_kernels = setup.policy in ("mixed_float16", "float64")
    return replace(setup, policy="float32") if volumes and lacks_kernels else setup


def without_muon_in_float64(setup: Setup) -> Setup:
    """It multiplies with a float32 square root."""
    if setup.policy != "float64" or setup.optimizer.kind != "keras.optimizers.Muon":
        return setup
    return replace(setup, policy="float32")


def without_scaled_sparse_gradients(setup: Setup) -> Setup:
    """``loss_scale_factor`` divides gradients, which those of an Embedding (IndexedSlices) do not support."""
    if all(branch.embedding is None for branch in setup.branches):
        return setup
    return replace(setup, optimizer=with_arguments(setup.optimizer, loss_scale_factor=lambda value: LEFT_OUT))


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
