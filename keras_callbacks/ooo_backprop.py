"""The one line in ``model.fit``."""

from __future__ import annotations

import os
from typing import Any

import keras

from tf_ooo.options import Options
from tf_ooo.report import Report
from tf_ooo.single_device import FitSession


class OOOBackprop(keras.callbacks.Callback):  # type: ignore[misc]
    """Reorders the backward pass of the model that is being trained; weights stay the same bits.

    The first steps alternate between the stock and the rewritten step, each training as usual; then
    the faster is kept.  ``fit`` may be called again; the model gets its own train function back.

    Example:
        >>> callback = tf_ooo.OOOBackprop()
        >>> model.fit(x, y, callbacks=[callback])
        >>> print(callback.report.summary())

    Args:
        mode: ``"auto"`` or ``"single_device"``.
        schedule: ``"auto"`` keeps the faster of stock and rewritten; a policy's name is applied as asked.
        memory_limit_bytes: peak bytes that the planned order may keep alive.
        profile_steps: steps of each order that are timed.
        timeline: folder for ``report.html`` and ``trace.json``, written when training ends.
        **mode_options: other fields of :class:`tf_ooo.Options`, such as ``strict``.

    Raises:
        OptionsError: an unknown option or value.
    """

    def __init__(
        self,
        mode: str = "auto",
        schedule: str = "auto",
        memory_limit_bytes: int | None = None,
        profile_steps: int = 3,
        timeline: str | os.PathLike[str] | None = None,
        **mode_options: Any,
    ) -> None:
        super().__init__()
        options = Options.from_arguments(
            mode=mode,
            schedule=schedule,
            memory_limit_bytes=memory_limit_bytes,
            profile_steps=profile_steps,
            timeline=timeline,
            **mode_options,
        )
        self._session = FitSession(options)

    @property
    def report(self) -> Report:
        """What was found, planned and measured, for the model trained last."""
        return self._session.report

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the controller in the place of the model's train function."""
        self._session.begin(self.model)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the model's own train function back and writes the timeline."""
        self._session.finish()
