"""What a pipeline refuses of a model, and what it says of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tf_ooo.compat import keras_layers, keras_losses, train_function
from tf_ooo.errors import BackendError

_COMPILED = "jit_compile=True: XLA compiles the step for one device; compile the model with jit_compile=False"


def check_model(model: Any, mode: str) -> None:
    """Raises BackendError for a model that cannot be cut."""
    reason = train_function.why_not_rewritable(model)
    if model.jit_compile is True and not train_function.keras_compiles_by_itself(model):
        reason = _COMPILED
    if reason is not None:
        raise BackendError(f"mode={mode!r}: {reason}")
    if keras_layers.made_in_strategy(model):
        raise BackendError(
            f"the model was made in the scope of a tf.distribute strategy; mode={mode!r} needs one "
            "made outside"
        )
    stateful = keras_layers.stateful_layers(model)
    if stateful:
        raise BackendError(
            f"mode={mode!r}: {stateful[0]} keeps the states of its rows from batch to batch (stateful=True), "
            "and batches are on their way side by side; make it with stateful=False"
        )
    summed = keras_losses.summed_losses(model) if mode == "pipeline" else []
    if summed:
        raise BackendError(
            f"loss {summed[0]!r} adds up rows (reduction='sum' or none), and micro-batches are averaged; use "
            "reduction='sum_over_batch_size' and a learning rate that is larger by the batch size"
        )


def notes_of(model: Any) -> Iterator[str]:
    """What several micro-batches change in the result of training."""
    names = keras_layers.batch_normalizations(model)
    if names:
        yield f"{len(names)} BatchNormalization layers normalize each micro-batch by itself: {names[0]}"
    masks = keras_losses.masks(model)
    if masks:
        yield (
            f"where the loss divides by what is not masked ({masks[0]}), each micro-batch's does by its own; "
            "they are averaged by rows, which is the whole batch's loss only where all have as much"
        )


def lost_text(variables: Sequence[str]) -> str:
    """What has become of variables whose worker is gone."""
    return (
        f"{len(variables)} variables, first {variables[0]}, were on a device that is gone; they have the "
        "values that they had before this fit: load the last checkpoint"
    )


def too_short_text(steps: int) -> str:
    """Why a fit of so few steps has not been cut."""
    return (
        f"training ended after {steps} steps, before the model was cut: one step more than profile_steps of "
        "one fit are on one device; profile_steps=1, or costs= of an earlier run, leave most of them out"
    )
