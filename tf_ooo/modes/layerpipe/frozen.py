"""Weights that no step changes (layers with ``trainable=False``): once on each device that reads them.

What is computed from them alone, a cast or a transpose, is the same in all rounds.  So none of it goes
through registers; a device that needs it computes it from a copy of its own, made when an epoch begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import tensorflow as tf

from grappler_passes.compat.shape_inference import OutputInfo
from tf_ooo.modes.layerpipe.accesses import accesses, read_where_it_is, zeros_on
from tf_ooo.modes.layerpipe.traced import Traced, placeholders_of

if TYPE_CHECKING:
    import keras


def frozen_weights(model: keras.Model, traced: Traced) -> frozenset[str]:
    """Return the placeholders of a model's weights that the step only reads; not of single numbers.

    Callbacks set those, such as the share of a loss, between batches: they are read anew in each round.
    """
    written = {state for access in accesses(traced.index) if access.writes for state in access.states}
    weights = (variable for variable in model.weights if len(variable.shape))
    return frozenset(placeholders_of(traced.captured, weights) - written)


class Copies:
    """Frozen weights on the devices that are not their own.

    ``wanted``: ``{placeholder for the value: (handle, device, OutputInfo)}``.
    """

    def __init__(self, traced: Traced, wanted: Mapping[str, tuple[str, str, OutputInfo]]) -> None:
        self._captured, self._wanted = traced.captured, wanted
        self._copies: dict[tuple[str, str], tf.Variable] = {}
        for handle, device, info in wanted.values():
            if device != traced.captured[handle].device and (handle, device) not in self._copies:
                self._copies[handle, device] = zeros_on(device, info)

    @property
    def variables(self) -> Collection[tf.Variable]:
        """Return all copies."""
        return self._copies.values()

    def refresh(self) -> None:
        """Takes over what the weights are now."""
        for (handle, _), copy in self._copies.items():
            copy.assign(read_where_it_is(self._captured[handle], copy.dtype, copy.shape))

    def given(self) -> dict[str, tf.Tensor]:
        """Return the weights, by placeholder."""
        weights = {}
        for name, (handle, device, info) in self._wanted.items():
            copy = self._copies.get((handle, device))
            if copy is None:
                weights[name] = read_where_it_is(self._captured[handle], info.dtype, info.shape)
                continue
            with tf.device(device):
                weights[name] = copy.read_value()
        return weights
