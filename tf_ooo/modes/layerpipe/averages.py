"""Weights that backward passes read in a later round than their forward pass did, as they are or rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_ooo.modes.layerpipe.accesses import accesses, read_where_it_is, zeros_on
from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced
from tf_ooo.modes.layerpipe.versions import LaterWeight

# A round gets values to read, and a function to call behind its ops.
Given = tuple[dict[str, tf.Tensor], Callable[[], None]]


class LaterWeights:
    """The latest weights; where ``averaged`` earlier ones, rebuilt from moving averages of updates.

    A weight has one average of what updates take off it, however many processors read it.
    """

    def __init__(
        self, traced: Traced, rounds: Rounds, placeholders: Sequence[LaterWeight], averaged: bool
    ) -> None:
        self.placeholders, self.names = placeholders, {weight.name for weight in placeholders}
        self._traced = traced
        self._span: dict[str, int] = {}
        for weight in placeholders:
            self._span[weight.handle] = max(self._span.get(weight.handle, 0), weight.behind)
        writes = [access for access in accesses(traced.index) if access.writes]
        self._updated = {
            handle: {rounds.of[access.name] for access in writes if handle in access.states}
            for handle in self._span
        }
        self._averages = {
            weight.handle: zeros_on(traced.captured[weight.handle].device, traced.outputs[weight.name][0])
            for weight in placeholders
            if averaged
        }

    @property
    def variables(self) -> Collection[tf.Variable]:
        """Return all averages."""
        return self._averages.values()

    def reset(self) -> None:
        """Reset before the first round of an epoch: no updates yet."""
        for average in self._averages.values():
            average.assign(np.zeros(average.shape, average.dtype.as_numpy_dtype))

    def given(self, low: int, high: int) -> Given:
        """Return the weights that a round reads, and a function to call behind it."""
        newest: dict[str, tf.Tensor] = {}
        for weight in self.placeholders:
            info, handle = self._traced.outputs[weight.name][0], self._traced.captured[weight.handle]
            newest[weight.handle] = read_where_it_is(handle, info.dtype, info.shape)
        rebuilt = {weight.name: self._rebuilt(weight, newest[weight.handle]) for weight in self.placeholders}
        return rebuilt, lambda: self._update(newest, low, high)

    def _rebuilt(self, weight: LaterWeight, newest: tf.Tensor) -> tf.Tensor:
        """About the weights of ``weight.behind`` updates ago (LayerPipe2)."""
        average = self._averages.get(weight.handle)
        if average is None:
            return newest
        with tf.device(average.device):
            return newest + tf.cast(weight.behind, newest.dtype) * average.read_value()

    def _update(self, before: dict[str, Any], low: int, high: int) -> None:
        """Follow the updates of a round; ``before`` are the weights at its start."""
        for handle, average in self._averages.items():
            if not any(low <= at <= high for at in self._updated[handle]):
                continue
            with tf.device(average.device):
                after = read_where_it_is(self._traced.captured[handle], average.dtype, average.shape)
                # A window of about as many updates as the weights are behind.
                share = tf.cast(2.0 / (self._span[handle] + 1.0), average.dtype)
                taken_off = before[handle] - after
                average.assign_add(share * (taken_off - average.read_value()), read_value=False)
