"""Whether the loss of a batch is the mean of its micro-batches' losses."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_ooo.compat import func_graphs, keras_layers, keras_losses, tf_functions, train_function
from tf_ooo.costs.places import first_of
from tf_ooo.errors import BackendError
from tf_ooo.tracing.changed import Taped
from tf_ooo.tracing.intercepting import Update, intercepted
from tf_ooo.tracing.micro_batches import parts_of, rows_of, split_rows
from tf_ooo.tracing.optimizers import optimizers_of
from tf_ooo.tracing.undone import Undone

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
# Kernels add up other shapes in another order; in half precision each row's loss has three digits.
_ROUNDING = 1e-3
_ROUNDING_OF_HALF = 3e-2
# Two micro-batches' loss over the mean of both, where rows are added up; random numbers and masks blur it.
_SUM = 2.0
_NEAR = 0.3


@dataclass(frozen=True)
class _Compared:
    """The loss of two micro-batches in one, and the mean of each one's."""

    together: float
    apart: float

    def adds_up(self, tolerance: float) -> bool:
        return abs(self.together - _SUM * self.apart) < tolerance * abs(self.apart)

    def differ(self, tolerance: float) -> bool:
        return abs(self.together - self.apart) > tolerance * max(abs(self.together), abs(self.apart))


def check_loss(model: keras.Model, batch: Any, microbatches: int) -> None:
    """BackendError where the loss adds up the rows of a batch, or compares them with one another.

    Computes it for neighbouring micro-batches, two in one and each by itself, without masks and batch
    statistics; only where code that is not Keras' own has a part in it.  No variable is changed.  With
    random numbers that cannot be switched off, or masks, only sums are seen.
    """
    rows = split_rows(rows_of(batch), microbatches)
    own = keras_losses.own_loss_code(model) if len(rows) > 1 else []
    if not own:
        return
    try:
        pairs, exact = _compare(model, batch, rows[-1])
    except Exception as error:  # the step that comes next raises it, if it is the user's
        _LOG.debug("the loss of a batch was not compared with its micro-batches': %s", error)
        return
    said = first_of(own, 3)
    if pairs and all(pair.adds_up(_ROUNDING_OF_HALF if exact else _NEAR) for pair in pairs):
        raise BackendError(
            f"the loss adds up rows (looked at: {said}): of two micro-batches in one it is "
            f"{pairs[0].together:.4g}, the mean of both {pairs[0].apart:.4g}; micro-batches are averaged, so "
            f"its gradients would be {len(rows)} times smaller: divide it by the number of rows and take a "
            "learning rate that is larger by it, or use microbatches=1; check_loss=False trains with the "
            "micro-batches' mean"
        )
    tolerance = _ROUNDING if model.compute_dtype == "float32" else _ROUNDING_OF_HALF
    differing = [pair for pair in pairs if pair.differ(tolerance)]
    if exact and differing:
        raise BackendError(
            f"the loss of two micro-batches in one is {differing[0].together:.4g}, the mean of both "
            f"{differing[0].apart:.4g} (looked at: {said}): it compares rows with one another, or divides by "
            "something else than rows, and a pipeline computes it for each micro-batch; use microbatches=1, "
            "or check_loss=False to train with the micro-batches' mean"
        )


def _compare(model: keras.Model, batch: Any, rows: int) -> tuple[list[_Compared], bool]:
    """Of all neighbours of so many rows that have a finite loss; whether the numbers are exact."""
    whole = rows_of(batch)
    pairs = parts_of(batch, [2 * rows] * (whole // (2 * rows)) + [whole % (2 * rows)])
    pairs = [pair for pair in pairs if rows_of(pair) == 2 * rows]
    of_part, of_both = _Loss(model, parts_of(pairs[0], (rows, rows))[0]), _Loss(model, pairs[0])
    compared = []
    for pair in pairs:
        apart = [of_part(part) for part in parts_of(pair, (rows, rows))]
        compared.append(_Compared(of_both(pair), float(np.mean(apart))))
    finite = [pair for pair in compared if np.isfinite([pair.together, pair.apart]).all()]
    return finite, not of_part.random and not keras_losses.masks(model)


class _Loss:
    """The loss whose gradients ``train_step`` applies."""

    def __init__(self, model: keras.Model, batch: Any) -> None:
        train_step = tf_functions.undecorated(model.train_step)

        def loss(batch: Any) -> Any:
            taped, losses = Taped(), []

            def note(update: Update) -> None:
                losses.extend(taped.losses_of(update.grads))

            with intercepted(optimizers_of(model), note), taped.noted(), keras_layers.inference_only(model):
                train_function.step_on_data(model, train_step, counts=False)(batch)
            return tf.add_n([tf.cast(tf.reduce_sum(loss), tf.float32) for loss in losses])

        self._undone = Undone(tf_functions.concrete_function(loss, [batch]))
        self.random = any(
            "Random" in kind for _, kind in func_graphs.ops_reached_from(self._undone.concrete.graph)
        )

    def __call__(self, batch: Any) -> float:
        with self._undone:
            return float(self._undone(batch))
