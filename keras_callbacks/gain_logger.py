"""Logs what an ``OOOBackprop`` gains, as numbers of each epoch."""

from __future__ import annotations

from typing import Any

from keras_callbacks.ooo_backprop import OOOBackprop, checked
from tf_ooo.compat.keras_fits import Callback


class GainLogger(Callback):
    """Adds ``ooo_step_s``, ``ooo_speed_up``, ``ooo_bubble_planned`` and ``ooo_bubble_measured`` to the logs.

    They are in ``History``, and in what callbacks listed after this one write at the end of each epoch, such
    as TensorBoard and CSVLogger: the median seconds of a step; how many times faster than its baseline it is;
    the share of all devices' time in which nothing runs, by the plan once steps repeat, and as measured with
    ``timeline=``.  A number that is not known yet is NaN.  On one device and in data parallel the seconds are
    those of the comparison, or of the first steps where stock is kept without it: later epochs repeat them.

    Example:
        >>> ooo = tf_ooo.OOOBackprop()
        >>> model.fit(x, y, callbacks=[ooo, GainLogger(ooo), keras.callbacks.TensorBoard("logs")])

    Args:
        callback: the ``OOOBackprop`` whose gain it is.

    Raises:
        OptionsError: another object.
    """

    def __init__(self, callback: OOOBackprop) -> None:
        super().__init__()
        self._callback = checked(callback)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Changes ``logs`` in place."""
        if logs is not None:
            logs.update({f"ooo_{name}": value for name, value in self._callback.report.scalars().items()})
