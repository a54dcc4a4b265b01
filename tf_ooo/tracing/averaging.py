"""Gradients averaged over all ranks, where optimizers apply them.

Loss scaling, clipping, weight decay and accumulation come after, inside the optimizer, so that all ranks see
the same numbers and take the same branches.
"""

from __future__ import annotations

import contextlib
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_ooo.compat import keras_optimizers, keras_variables, tf_functions
from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.tracing.already import OWN, REDUCED, Origins
from tf_ooo.tracing.intercepting import Update, intercepted, tensors_of, times
from tf_ooo.tracing.slices import GradientSlices
from tf_ooo.tracing.variables import optimizers_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")


class Averaging:
    """Averages what the optimizers of a model are given.

    With ``gradient_accumulation_steps`` each micro-batch's gradient is averaged: ``Adasum`` then combines
    micro-batches, not their sums.  ``weighting="samples"``: every sample counts the same, as in one process
    on all ranks' batches together; ``"ranks"``: every rank does, as in Horovod.
    """

    def __init__(self, engine: Engine, op: str, compression: str, weighting: str = "ranks") -> None:
        self.engine, self.op, self.compression, self.weighting = engine, op, compression, weighting
        self.averaged: set[str] = set()
        self.left_alone: set[str] = set()
        self.slices = GradientSlices()
        self._factor: Any = 1.0
        self._weights: list[Any] = []
        self._seen_eagerly = False

    def wrap(self, model: keras.Model) -> Callable[[Callable[..., Any]], Callable[..., Any]]:

        def wrapper(train_step: Callable[..., Any]) -> Callable[..., Any]:
            # A tf.function would go on averaging, or not averaging, as it was first traced.
            train_step = tf_functions.undecorated(train_step)

            def averaging_train_step(data: object) -> Any:
                with self.active(optimizers_of(model), data, model.trainable_weights):
                    return train_step(data)

            return averaging_train_step

        return wrapper

    @contextlib.contextmanager
    def active(
        self, optimizers: Sequence[Any], data: object = None, weights: Sequence[Any] = ()
    ) -> Iterator[None]:
        """Inside the block what these optimizers are given is averaged.

        Args:
            optimizers: of Keras.
            data: the batch; its rows count with ``weighting="samples"``.
            weights: all that is trained.
        """
        self._factor = self._weight_of(data) if self.weighting == "samples" else 1.0
        states = [state for optimizer in optimizers for state in keras_optimizers.state_of(optimizer)]
        self._weights = [keras_variables.value_of(variable) for variable in (*weights, *states)]
        try:
            with intercepted(optimizers, self._average_first):
                yield
        finally:
            self._factor = 1.0

    def _average_first(self, update: Update) -> Any:
        if keras_optimizers.horovod_averages(update.optimizer):
            self.left_alone.update(map(keras_variables.path_of, update.variables))
            return update.proceed(update.grads)
        if tf.executing_eagerly() and self.op != "Average" and not self._seen_eagerly:
            self._seen_eagerly = True
            self._refuse_equal(update.grads)
        return update.proceed(self.average(update.grads, update.variables))

    def _refuse_equal(self, grads: Sequence[Any]) -> None:
        """BackendError for gradients that a step has reduced which runs eagerly: no graph shows it."""
        arrays = [np.asarray(part) for grad in grads for part in tensors_of(grad)]
        mine = zlib.crc32(b"".join(array.tobytes() for array in arrays))
        everyone = self.engine.gather(mine)
        if len(everyone) > 1 and len(set(everyone)) == 1 and any(array.any() for array in arrays):
            raise BackendError(
                f"gradients are the same on all ranks before OOOBackprop(op={self.op!r}) reduces them: "
                "train_step does so by itself, which run_eagerly=True does not show, or all ranks have the "
                "same data: compile with run_eagerly=False, or reduce nothing in train_step"
            )

    def average(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients to apply; None stays None, what the user has averaged stays as it is.

        Raises BackendError where he has averaged a part of one.
        """
        out, mine, origins = list(grads), [], Origins(self._weights)
        for place, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None:
                continue
            if self._is_reduced(origins, grad, variable):
                self.left_alone.add(keras_variables.path_of(variable))
            else:
                mine.append(place)
                self.averaged.add(keras_variables.path_of(variable))
        if self.left_alone and not mine:
            _LOG.info("the train step averages its gradients itself; they are not averaged again")
        by_op: dict[str, list[int]] = {}
        for place in mine:
            by_op.setdefault(self._op_for(variables[place]), []).append(place)
        for op, places in by_op.items():
            named = [(_name(variables[i], i), times(grads[i], self._factor)) for i in places]
            for i, averaged in zip(places, self._allreduce(named, op), strict=True):
                out[i] = averaged
        return out

    def _is_reduced(
        self, origins: Origins, grad: tf.Tensor | tf.IndexedSlices, variable: keras.Variable
    ) -> bool:
        """Say whether the train step has reduced it; False if it runs eagerly. BackendError: a part of it."""
        origin = origins.gradient(grad)
        part = origins.reduced_part(grad) if origin == OWN | REDUCED else ""
        if part:
            raise BackendError(
                f"train_step reduces the gradient of {keras_variables.path_of(variable)} over the ranks by "
                f"itself ({part}) and then adds what this rank has computed of its own data: add that before "
                f"the gradient is reduced, or leave it to OOOBackprop(op={self.op!r}) to reduce the sum"
            )
        return origin == REDUCED

    def _allreduce(self, named: Sequence[tuple[str, Any]], op: str) -> list[Any]:
        def reduce(slices: Sequence[tuple[str, Any]]) -> list[Any]:
            return self.engine.allreduce(slices, op, self.compression)

        return self.slices.allreduce(named, reduce, may_slice=op != "Adasum")

    def _op_for(self, variable: keras.Variable) -> str:
        # The "gradient" of such a variable (a scale of float8 training) is its next value.
        return "Average" if keras_variables.is_overwritten_with_gradient(variable) else self.op

    def _weight_of(self, data: object) -> Any:
        """This rank's samples over the mean of all ranks'; exactly 1 where all have as many."""
        first = next(t for t in tf.nest.flatten(data) if hasattr(t, "shape") and t.shape.rank != 0)
        count = tf.cast(tf.shape(first)[0], tf.float32)
        total = self.engine.sum(count, "tf_ooo_samples")
        return count * (float(self.engine.size) / total)


def _name(variable: keras.Variable, place: int) -> str:
    """Return the same on all ranks.

    Not the path: Keras numbers layers within a process, and a rank would wait for ever for another's
    "dense_7".
    """
    short = unnumbered(keras_variables.path_of(variable))
    return f"tf_ooo_{place}_" + "".join(c if c.isalnum() else "_" for c in short)


def unnumbered(path: str) -> str:
    """Return the last part of a variable's name, without the number that Keras counts within a process."""
    return re.sub(r"_\d+$", "", path.rsplit("/", 1)[-1])
