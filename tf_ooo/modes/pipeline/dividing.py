"""Into how many micro-batches batches are divided: as asked, or as a model's batch normalization allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tf_ooo.compat import keras_layers, keras_losses
from tf_ooo.costs.places import first_of
from tf_ooo.errors import BackendError
from tf_ooo.modes.pipeline.options import WHOLE_BATCH, Pipeline
from tf_ooo.options.base import is_file
from tf_ooo.planning.choosing.on_paper import MICROBATCHES
from tf_ooo.tracing.micro_batches import Division

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras

# With fewer rows statistics are so rough that models train visibly worse (Wu and He 2018, figure 1).
LEAST_ROWS = 8
_WHY_ONE = (
    "its statistics are sums over all rows before any row is normalized, so at each such layer every "
    "micro-batch would wait for all others, forward and backward"
)


def division_of(model: keras.Model, options: Pipeline) -> Division:
    """Return how batches are divided. BackendError: the asked number cannot keep batch statistics."""
    names = keras_layers.normalizing_in_training(model)
    given, replicas = options.microbatches, options.replicas
    if names and options.batch_norm == WHOLE_BATCH:
        _refuse_several(names, given, replicas, is_file(options.schedule))
        return Division(1)
    if given is not None:
        return Division(given)
    if not names or is_file(options.schedule):  # a file says itself how many there are
        return Division(MICROBATCHES)
    return Division(MICROBATCHES, LEAST_ROWS, replicas if isinstance(replicas, int) else 1)


def _refuse_several(names: Sequence[str], given: int | None, replicas: object, from_file: bool) -> None:
    asked = f"microbatches={given}" if given not in (None, 1) else ""
    if isinstance(replicas, int) and replicas > 1:
        asked = f"replicas={replicas}, which share a batch's micro-batches,"
    if asked or (from_file and given is None):
        raise BackendError(
            f"batch_norm={WHOLE_BATCH!r} needs one micro-batch for {first_of(names)}, got "
            f"{asked or 'a schedule of a file'}: {_WHY_ONE}; leave it out, or take batch_norm='micro_batch'"
        )


def one_micro_batch_note(model: keras.Model, options: Pipeline) -> str:
    """Say why a batch stays whole, and what that costs; empty: nothing asks for it."""
    names = keras_layers.normalizing_in_training(model) if options.batch_norm == WHOLE_BATCH else []
    if not names:
        return ""
    return (
        f"batch_norm={WHOLE_BATCH!r}: the batch stays in one micro-batch, as {first_of(names)} normalizes "
        f"over it: {_WHY_ONE}; the result is stock's, and devices mostly work one after another, so that "
        "memory is shared out and little time is saved"
    )


def micro_batch_notes(model: keras.Model, rows: Sequence[int]) -> list[str]:
    """Say what micro-batches of so many ``rows`` each change in the result of training."""
    texts = []
    names = keras_layers.normalizing_in_training(model)
    if names:
        few = ", and with so few rows visibly worse" if min(rows) < LEAST_ROWS else ""
        texts.append(
            f"BatchNormalization normalizes each micro-batch by itself: {first_of(names)}, over {min(rows)} "
            f"rows instead of the batch's {sum(rows)}; moving averages change once a step, by the mean and "
            "the variance of all rows; loss and val_loss become others than in stock training"
            f"{few}; batch_norm={WHOLE_BATCH!r} keeps stock's result, in one micro-batch; fewer "
            "microbatches= or larger batches come nearer to it"
        )
    random = keras_layers.random_layers(model)
    if random:
        texts.append(
            "random numbers are drawn for each micro-batch, others than for the whole batch and the same for "
            f"all schedules: {first_of(random)}; masks are as random as stock's, but other ones"
        )
    masks = keras_losses.masks(model)
    if masks:
        texts.append(
            f"where the loss divides by what is not masked, or by weights of rows ({masks[0]}), each "
            "micro-batch's does by its own; "
            "they are averaged by rows, which is the whole batch's loss only where all have as much"
        )
    return texts
