"""Weights that no step changes (layers with ``trainable=False``): once on each device that reads them.

What is computed from them alone, a cast or a transpose, is the same in all rounds.  So none of it goes
through registers; a device that needs it computes it from a copy of its own, made when an epoch begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.effects import has_side_effects, only_reads, states_of
from tf_ooo.compat import keras_variables
from tf_ooo.modes.layerpipe.traced import Traced, zeros_on


def frozen_weights(model: Any, traced: Traced) -> frozenset[str]:
    """The placeholders of a model's weights that the step only reads; not of single numbers.

    Callbacks set those, such as the share of a loss, between batches: they are read anew in each round.
    """
    index = traced.index
    written = {
        state
        for i, op in enumerate(index.ops)
        if has_side_effects(op) and not only_reads(op)
        for state in states_of(index, i)
    }
    values = [keras_variables.value_of(variable) for variable in model.weights if len(variable.shape)]
    weights = {id(value.handle) for value in values if value is not None}
    return frozenset(
        name for name, outside in traced.captured.items() if id(outside) in weights and name not in written
    )


class Copies:
    """Frozen weights on the devices that are not their own.

    Args:
        traced: the step.
        wanted: ``{placeholder for the value: (handle, device, OutputInfo)}``.
    """

    def __init__(self, traced: Traced, wanted: Mapping[str, tuple[str, str, OutputInfo]]) -> None:
        self._traced, self._wanted = traced, wanted
        self._copies: dict[tuple[str, str], Any] = {}
        for handle, device, info in wanted.values():
            if device != traced.captured[handle].device and (handle, device) not in self._copies:
                self._copies[handle, device] = zeros_on(device, info)

    @property
    def bytes(self) -> int:
        """Of all copies."""
        sizes = (v.dtype.size * math.prod(v.shape.as_list()) for v in self._copies.values())
        return int(sum(sizes))

    def refresh(self) -> None:
        """Takes over what the weights are now."""
        for (handle, _), copy in self._copies.items():
            copy.assign(self._read(handle, copy.dtype))

    def given(self) -> dict[str, Any]:
        """The weights, by placeholder."""
        import tensorflow as tf

        weights = {}
        for name, (handle, device, info) in self._wanted.items():
            copy = self._copies.get((handle, device))
            with tf.device(device):
                if copy is not None:
                    weights[name] = copy.read_value()
                    continue
                weights[name] = self._read(handle, tf.as_dtype(info.dtype))
                weights[name].set_shape(info.shape)
        return weights

    def _read(self, handle: str, dtype: Any) -> Any:
        import tensorflow as tf

        outside = self._traced.captured[handle]
        with tf.device(outside.device):
            return tf.raw_ops.ReadVariableOp(resource=outside, dtype=dtype)
