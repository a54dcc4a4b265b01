"""A set-up of a training: the parts of a program with a Keras model, and how the model is trained."""

from __future__ import annotations

from dataclasses import dataclass

from tf_ooo.planning.policies import POLICIES


@dataclass(frozen=True)
class Output:
    """A dense layer's loss and metrics, and how its targets are made of ``random`` and ``rows``."""

    loss: str
    targets: str
    loss_weight: float | None = None
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """Says how a pipeline runs. ``chunks`` is for interleaved_1f1b, ``group`` for modulo, others for all.

    ``compile_tasks`` is True or left out.
    """

    schedule: str = "gpipe"
    devices: int = 2
    profile_steps: int = 0
    chunks: int | None = None
    group: int | None = None
    replicas: int = 1
    recompute: str = "none"
    compile_tasks: bool | None = None

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
    """Says how two ranks train: ``launch`` is a key of LAUNCHES, all else are options of the mode.

    ``compile_tasks`` is True or left out.
    """

    launch: str = "horovod"
    schedule: str = "fast_forward"
    k: int | None = None
    unroll: int | None = None
    op: str = "Average"
    compression: str = "none"
    weighting: str = "ranks"
    lockstep: str = "auto"
    compile_tasks: bool | None = None

    @property
    def engine(self) -> str:
        return "collectives" if self.launch == "collectives" else "horovod"


@dataclass(frozen=True)
class Setup:
    """One training.

    Attributes:
        number: what it was drawn from, also the seed of all that is random in it.
        model: the lines that make ``h`` of ``input_0`` and ``input_1``.
        inputs: how the data of each are made of ``random`` and ``rows``.
        trained_layers: how many there are at least, without those of the outputs.
        moves: whether there must be an order to choose: there is something that is trained below the outputs.
        pipelines: two that are compared, with as many ``microbatches``.
    """

    number: int
    model: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    optimizer: str
    trained_layers: int = 0
    moves: bool = True
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
    def wide(self) -> bool:
        """Return whether losses and metrics are float64, too, where what is rounding is told from faults."""
        return self.policy == "float64" and self.mode.startswith("compiled")

    @property
    def mode(self) -> str:
        """Return the mode as the command names it."""
        if self.ranks:
            return "compiled_data_parallel" if self.ranks.compile_tasks else "data_parallel"
        if any(pipeline.compile_tasks for pipeline in self.pipelines):
            return "compiled_pipeline"
        return "pipeline" if self.pipelines else "single"
