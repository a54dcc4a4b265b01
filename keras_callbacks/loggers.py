"""Defines callbacks that tell what an ``OOOBackprop`` gains: as numbers of each epoch, and as a report."""

from __future__ import annotations

import os
from typing import Any

from keras_callbacks.ooo_backprop import OOOBackprop
from tf_ooo.compat.keras_fits import Callback
from tf_ooo.errors import OptionsError
from tf_ooo.report.parts import save_timeline


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
        self._callback = _checked(callback)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Change ``logs`` in place."""
        if logs is not None:
            logs.update({f"ooo_{name}": value for name, value in self._callback.report.scalars().items()})


class TimelineLogger(Callback):
    """Writes ``report.html`` and ``trace.json`` at the end, or after every epoch.

    Example:
        >>> ooo = tf_ooo.OOOBackprop()
        >>> model.fit(x, y, callbacks=[ooo, TimelineLogger(ooo, "out")])

    Args:
        callback: the ``OOOBackprop`` whose report is written.
        folder: where to; made if it is not there.
        every_epoch: also write ``epoch_001_report.html`` and so on.
    """

    def __init__(
        self, callback: OOOBackprop, folder: str | os.PathLike[str], every_epoch: bool = False
    ) -> None:
        super().__init__()
        self._callback, self._folder, self._every_epoch = _checked(callback), folder, every_epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's files where asked to."""
        if self._every_epoch:
            save_timeline(self._callback.report, self._folder, f"epoch_{epoch + 1:03d}_")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the final files."""
        save_timeline(self._callback.report, self._folder)


def _checked(callback: object) -> OOOBackprop:
    """Check the callback that others report on. OptionsError: it is another object."""
    if not isinstance(callback, OOOBackprop):
        raise OptionsError(f"callback={callback!r} is not accepted; accepted: an OOOBackprop")
    return callback
