"""A training and the fault that strikes it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

# Every training has so many epochs, of so many steps, of so many rows.
EPOCHS, STEPS, ROWS = 4, 3, 8


@dataclass(frozen=True)
class Mode:
    """Describes what a training of that name is made of.

    Attributes:
        options: of ``OOOBackprop``; ``devices`` of a cluster are added.
        ranks: processes that train, launched for ``engine``.
        workers: processes that ``tf-ooo worker`` serves, beside the one that trains.
        devices: logical CPUs of a process that trains; 0: as TensorFlow has them.
    """

    options: tuple[tuple[str, object], ...]
    ranks: int = 1
    engine: str = ""
    workers: int = 0
    devices: int = 0
    compiles: bool = False

    @property
    def rounds(self) -> bool:
        """Tell whether a resumed training rounds otherwise: its first step runs before XLA compiles it."""
        return ("compile_tasks", True) in self.options


_PIPELINE = (("mode", "pipeline"), ("microbatches", 2), ("schedule", "1f1b"))
_BY_XLA = (("compile_tasks", True), ("first_steps", "whole"), ("profile_steps", 0))
_LATE = (("mode", "layerpipe"), ("schedule", "layerpipe"))
MODES = {
    "single": Mode((("schedule", "fast_forward"), ("profile_steps", 0))),
    "compiled": Mode(
        (("schedule", "multi_stream"), ("any_platform", True), ("profile_steps", 0)), compiles=True
    ),
    "data_parallel": Mode((("mode", "data_parallel"),), ranks=2, engine="horovod"),
    "collectives": Mode((("mode", "data_parallel"),), ranks=2, engine="collectives"),
    "pipeline": Mode((*_PIPELINE, ("devices", 2)), devices=2),
    "pipeline_workers": Mode(_PIPELINE, workers=1),
    "replicas": Mode((*_PIPELINE, ("devices", 2), ("replicas", 2)), ranks=2, engine="horovod", devices=2),
    "compiled_pipeline": Mode((*_PIPELINE, *_BY_XLA, ("devices", 2)), devices=2),
    "compiled_workers": Mode((*_PIPELINE, *_BY_XLA), workers=1),
    "compiled_ranks": Mode(
        (
            *(("mode", "data_parallel"), ("schedule", "reverse_first_k"), ("k", 2)),
            *(("compile_tasks", True), ("profile_steps", 0), ("compare", False)),
        ),
        ranks=2,
        engine="collectives",
    ),
    "layerpipe": Mode((*_LATE, ("devices", 2)), devices=2),
    "layerpipe_workers": Mode(_LATE, workers=1),
}
# Optimizer, where the batches come from, whether there is a validation.
VARIANTS = (("adam", "arrays", True), ("momentum", "generator", False), ("adam", "sequence", False))
SAVINGS = ("models", "model", "weights", "backup", "two_backups")


@dataclass(frozen=True)
class Training:
    """A fit without any fault: ``mode`` is a key of MODES, ``variant`` a place in VARIANTS."""

    mode: str
    variant: int
    saving: str

    @property
    def name(self) -> str:
        """The same for all trainings that end with the same bits."""
        return f"{self.mode}-{self.variant}"


@dataclass(frozen=True)
class Point:
    """A call of the training process: the ``number``-th, from 1, of ``where``.

    ``where`` is a method of callbacks without its ``on_``, ``"saving"`` (of the last layer's weights), or
    ``"data"`` (the batch that is asked for).
    """

    where: str
    number: int


# Processes are called like this: the training's first one, its others, a worker; or all of them at once.
FIRST, SECOND, WORKER, ALL = "rank 0", "rank 1", "worker 1", "all"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: ``"kill"`` (SIGKILL), ``"terminate"`` (SIGTERM), ``"interrupt"`` (Ctrl-C), ``"stop"`` (SIGSTOP,
            for ever), ``"pause"`` (SIGSTOP, then SIGCONT), ``"exception"``, ``"slow"`` (a call that sleeps),
            ``"full_disk"``, ``"file_limit"`` (files may not grow beyond it).
        target: the process that is struck.
        when: a point of the target (of rank 0 for a worker), or a part of the time that the training takes.
        seconds: of a pause, or of a slow call.
        free_bytes: on the disk that is full, or how large a file may become.
    """

    kind: str
    target: str
    when: Point | float
    seconds: float = 0.0
    free_bytes: int = 0


@dataclass(frozen=True)
class Setup:
    """``number``: what it was drawn from; ``same_workers``: those that live serve the resumed training."""

    number: int
    training: Training
    fault: Fault
    same_workers: bool = False
