"""What a pipeline refuses of a model, and what it says of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tf_ooo.compat import keras_layers, keras_losses
from tf_ooo.errors import BackendError


def check_losses(model: Any) -> None:
    """Raises BackendError for losses that do not average their rows."""
    summed = keras_losses.summed_losses(model)
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
