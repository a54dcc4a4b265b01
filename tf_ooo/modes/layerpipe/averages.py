"""Moving averages of what updates take off the weights, from which earlier weights are rebuilt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_ooo.modes.layerpipe.rounds import Rounds
from tf_ooo.modes.layerpipe.traced import Traced, zeros_on
from tf_ooo.modes.layerpipe.versions import Now, writes


def read_weight(traced: Traced, weight: Now) -> Any:
    """The present value of a variable, read where it is."""
    import tensorflow as tf

    handle = traced.captured[weight.handle]
    info = traced.outputs[weight.name][0]
    with tf.device(handle.device):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(info.dtype))
    value.set_shape(info.shape)
    return value


class Averages:
    """One average for each weight that a backward pass reads later than its forward pass did.

    Args:
        traced, rounds: of the step.
        now: these weights.
    """

    def __init__(self, traced: Traced, rounds: Rounds, now: Sequence[Now]) -> None:
        self._captured = traced.captured
        self._span: dict[str, int] = {}
        for weight in now:
            self._span[weight.handle] = max(self._span.get(weight.handle, 0), weight.behind)
        updates = writes(traced.index)
        self._updated = {
            handle: {rounds.of[name] for name in updates.get(handle, ())} for handle in self._span
        }
        self._values = {
            weight.handle: zeros_on(traced.captured[weight.handle].device, traced.outputs[weight.name][0])
            for weight in now
        }

    @property
    def bytes(self) -> int:
        """Of all averages."""
        return sum(v.dtype.size * v.shape.num_elements() for v in self._values.values())

    def reset(self) -> None:
        """No updates yet."""
        import tensorflow as tf

        for value in self._values.values():
            value.assign(tf.zeros_like(value))

    def rebuilt(self, weight: Now, newest: Any) -> Any:
        """About the weights of ``one.behind`` updates ago (LayerPipe2)."""
        import tensorflow as tf

        average = self._values[weight.handle]
        with tf.device(average.device):
            return newest + tf.cast(weight.behind, newest.dtype) * average.read_value()

    def update(self, before: Mapping[str, Any], low: int, high: int) -> None:
        """After the updates of a round; ``before`` are the weights at its start."""
        import tensorflow as tf

        for handle, average in self._values.items():
            if not any(low <= at <= high for at in self._updated[handle]):
                continue
            with tf.device(average.device):
                after = tf.raw_ops.ReadVariableOp(resource=self._captured[handle], dtype=average.dtype)
                # A window of about as many updates as the weights are behind.
                share = tf.cast(2.0 / (self._span[handle] + 1.0), average.dtype)
                taken_off = before[handle] - after
                average.assign_add(share * (taken_off - average.read_value()), read_value=False)
