"""Writes an ``OOOBackprop``'s report while training runs."""

from __future__ import annotations

import os
from typing import Any

from keras_callbacks.ooo_backprop import OOOBackprop, checked
from tf_ooo.compat.keras_fits import Callback
from tf_ooo.fit.reporting import save_timeline


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
        self._callback, self._folder, self._every_epoch = checked(callback), folder, every_epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's files where asked to."""
        if self._every_epoch:
            save_timeline(self._callback.report, self._folder, f"epoch_{epoch + 1:03d}_")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the final files."""
        save_timeline(self._callback.report, self._folder)
