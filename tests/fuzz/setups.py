"""A set-up of a training, as plain data: what a program with a Keras model would say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.catalogue import LAYERS, LEFT_OUT
from tf_ooo.planning.policies import POLICIES


@dataclass(frozen=True)
class Part:
    """A call of a class, such as ``layers.Dense(units=5)``; arguments may be parts, too."""

    kind: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str) -> Any:
        return dict(self.arguments).get(name)

    def parts(self) -> Iterator[Part]:
        """It and those in its arguments."""
        yield self
        for _, value in self.arguments:
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Part):
                    yield from inner.parts()


@dataclass(frozen=True)
class Skip:
    """Joins what goes through these layers with what goes past them."""

    join: str
    steps: tuple[Part, ...]


@dataclass(frozen=True)
class Shared:
    """One layer that is applied to two tensors: its weights are tied."""

    layer: Part


Step = Part | Skip | Shared


@dataclass(frozen=True)
class Branch:
    """An input and what follows it, down to one row of features.

    ``kind`` is a key of RANKS; tokens have an embedding.  ``reduced_by`` is what makes features of anything
    else, such as Flatten.
    """

    kind: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    reduced_by: str = "Flatten"
    embedding: Part | None = None


@dataclass(frozen=True)
class Output:
    """A dense layer, its loss, and the metrics beside it."""

    units: int
    loss: Part
    loss_weight: float | None = None
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """Says how a pipeline runs. ``chunks`` is for interleaved_1f1b, ``group`` for modulo, others for all."""

    schedule: str = "gpipe"
    devices: int = 2
    profile_steps: int = 0
    chunks: int | None = None
    group: int | None = None
    replicas: int = 1
    recompute: str = "none"

    @property
    def layers(self) -> int:
        """Return how many layers it needs."""
        devices = self.devices // self.replicas
        if self.group is not None:
            return (devices - 1) * self.group + 1
        if self.schedule == "auto":
            return devices
        return devices * (self.chunks or POLICIES[self.schedule].needs.chunks.tried[0])


@dataclass(frozen=True)
class Ranks:
    """Says how two ranks train: ``launch`` is a key of LAUNCHES, all else are options of the mode."""

    launch: str = "horovod"
    schedule: str = "fast_forward"
    k: int | None = None
    unroll: int | None = None
    op: str = "Average"
    compression: str = "none"
    weighting: str = "ranks"
    lockstep: str = "auto"

    @property
    def engine(self) -> str:
        return "collectives" if self.launch == "collectives" else "horovod"


@dataclass(frozen=True)
class Setup:
    """One training: ``number`` is what it was drawn from, also the seed of all that is random in it.

    ``pipelines`` are two that are compared, with as many ``microbatches``.
    """

    number: int
    branches: tuple[Branch, ...]
    join: str
    trunk: tuple[Step, ...]
    outputs: tuple[Output, ...]
    optimizer: Part
    policy: str = "float32"
    schedule: str = "fast_forward"
    profile_steps: int = 0
    steps_per_execution: int = 1
    rows: int = 16
    epochs: int = 1
    sample_weights: bool = False
    microbatches: int = 2
    pipelines: tuple[Pipeline, ...] = ()
    ranks: Ranks | None = None

    @property
    def mode(self) -> str:
        """Return the mode as the command names it."""
        if self.ranks:
            return "data_parallel"
        return "pipeline" if self.pipelines else "single"

    @property
    def below(self) -> tuple[Step, ...]:
        """All that stands below the outputs, embeddings, too."""
        embeddings = tuple(branch.embedding for branch in self.branches if branch.embedding)
        return (*embeddings, *(step for branch in self.branches for step in branch.steps), *self.trunk)

    @property
    def joins(self) -> bool:
        """Say whether branches are joined by an op that needs a dense layer before it."""
        return len(self.branches) > 1 and self.join != "Concatenate"

    def trained_layers(self) -> int:
        """Return how many there are at least."""
        joins = len(self.branches) if self.joins else 0
        return joins + sum(map(trained_layers_of, self.below)) + len(self.outputs)

    def has_chain(self) -> bool:
        """Return whether anything is trained below the outputs: there is nothing to move otherwise.

        Several cells are layers of one loop, past which nothing may be moved.
        """
        return self.joins or (any(map(trains, self.below)) and not any(map(_has_cells, self.below)))

    def parts(self) -> Iterator[Part]:
        """All calls of classes."""
        layers = [part for step in self.below for part in parts_of(step)]
        for part in (*layers, self.optimizer, *(output.loss for output in self.outputs)):
            yield from part.parts()


def trains(step: Step) -> bool:
    """Return whether it has weights that are trained."""
    if isinstance(step, Skip) and step.join != "Concatenate":
        return True  # a dense layer before the join
    for part in parts_of(step):
        outer = (
            part.get("trainable") is not False and (part.get("layer") or part).get("trainable") is not False
        )
        kind = LAYERS.get(part.kind.removeprefix("layers."))
        bare = part.get("center") is False and part.get("scale") is False
        no_scale = part.kind == "layers.Attention" and not part.get("use_scale")
        if outer and not bare and not no_scale and (kind is None or kind.trains):
            return True
    return False


def _has_cells(step: Step) -> bool:
    return any(isinstance(part.get("cell"), tuple) for part in parts_of(step))


def trained_layers_of(step: Step) -> int:
    """Return how many there are, at least; see :func:`trains`."""
    join = isinstance(step, Skip) and step.join != "Concatenate"
    return join + sum(map(trains, parts_of(step)))


def parts_of(step: Step) -> tuple[Part, ...]:
    if isinstance(step, Skip):
        return step.steps
    return (step.layer,) if isinstance(step, Shared) else (step,)


def rank_after(step: Step, rank: int) -> int | None:
    """Return how many dimensions follow that of the rows; None where the step takes no such tensor."""
    if isinstance(step, Skip):
        for part in step.steps:
            if rank_after(part, rank) != rank or not keeps_shape(part):
                return None
        return rank
    if isinstance(step, Shared):
        return rank if rank_after(step.layer, rank) == rank and keeps_shape(step.layer) else None
    kind = LAYERS[step.kind.removeprefix("layers.")]
    if rank not in kind.ranks:
        return None
    inner = step.get("layer") or step
    if inner.get("return_sequences"):
        return rank
    return kind.rank_after(rank)


def keeps_shape(part: Part) -> bool:
    """All but the last dimension."""
    kind = LAYERS[part.kind.removeprefix("layers.")]
    if kind.recurrent:
        return bool((part.get("layer") or part).get("return_sequences"))
    return kind.keeps_shape and part.get("strides") in (None, 1) and part.get("padding") in (None, "same")


def with_arguments(part: Part, **changes: Callable[[Any], Any]) -> Part:
    """Arguments of these names changed, in the part and those inside; LEFT_OUT takes one away."""

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, Part):
            value = with_arguments(value, **changes)
        elif isinstance(value, tuple):
            value = tuple(with_arguments(v, **changes) if isinstance(v, Part) else v for v in value)
        return changes[name](value) if name in changes else value

    arguments = ((name, changed(name, value)) for name, value in part.arguments)
    return Part(part.kind, tuple((name, value) for name, value in arguments if value is not LEFT_OUT))


def with_parts(setup: Setup, change: Callable[[Part], Part]) -> Setup:
    """The same change to all layers."""
    of_step = functools.partial(_of_step, change)
    branches = tuple(
        replace(
            branch,
            steps=tuple(map(of_step, branch.steps)),
            embedding=branch.embedding and change(branch.embedding),
        )
        for branch in setup.branches
    )
    return replace(setup, branches=branches, trunk=tuple(map(of_step, setup.trunk)))


def _of_step(change: Callable[[Part], Part], step: Step) -> Step:
    if isinstance(step, Skip):
        return replace(step, steps=tuple(map(change, step.steps)))
    return replace(step, layer=change(step.layer)) if isinstance(step, Shared) else change(step)
