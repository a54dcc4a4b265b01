"""Defines ``OOOBackprop``, the one line to add in ``model.fit``."""

from __future__ import annotations

import os
from typing import Any

from grappler_passes.compat import releases
from tf_ooo.compat.keras_fits import Callback
from tf_ooo.errors import OptionsError
from tf_ooo.fit.guard import in_short
from tf_ooo.fit.life import FitLife
from tf_ooo.modes.by_name import Options, options_for_fit
from tf_ooo.modes.table import mode_for
from tf_ooo.options import ModeOptions
from tf_ooo.report.report import Report

releases.say_at_import()  # modes, which would say it, load on first use


class OOOBackprop(Callback):
    """Reorders the backward pass of the model that is being trained.

    Weights stay the same bits; with several micro-batches or processes they are those of the joint batch, and
    in mode layerpipe gradients are late by request.

    On one device some steps alternate between the stock and the rewritten step, where the fit is long
    enough to pay for it; each trains as usual, and the faster is kept.  ``fit`` may be called again; the
    model gets its own train function back.

    Example:
        >>> callback = tf_ooo.OOOBackprop()
        >>> model.fit(x, y, callbacks=[callback])
        >>> print(callback.report.summary())

    Args:
        mode: ``"single_device"``, ``"data_parallel"``, ``"pipeline"``, ``"layerpipe"``, or ``"auto"``:
            data_parallel where horovodrun started several processes.  In the place of a name and all other
            arguments: ``tf_ooo.SingleDevice(...)``, ``DataParallel(...)``, ``Pipeline(...)`` or
            ``LayerPipe(...)``.
        schedule: ``"auto"`` keeps the faster of stock and rewritten; a policy's name is applied as asked, as
            is, in a pipeline, the schedule in a file of one's own: ``"my_schedule.txt"`` or a path.
        memory_limit_bytes: peak bytes that the planned order may keep alive on each device.  None: no
            limit, in a pipeline the least that its devices report.
        profile_steps: steps of each order that are timed; ``"auto"`` on one device times as many as it needs.
        timeline: folder for ``report.html`` and ``trace.json``, written when training ends.
        devices: how many devices, or which, a model is spread over: ``2``, ``["GPU:0", "GPU:1"]``, or the
            workers of a cluster, ``"host1:2222,host2:2222"``.  None: one, with pipeline or layerpipe all.
        **mode_options: other options of the mode, such as ``strict``, ``microbatches``.

    Raises:
        OptionsError: an unknown option or value, or an option of another mode.
        BackendError: ``mode="layerpipe"`` in one of several launched processes.
    """

    def __init__(
        self,
        mode: str | ModeOptions | Options = "auto",
        schedule: str | os.PathLike[str] = "auto",
        memory_limit_bytes: int | None = None,
        profile_steps: int = 3,
        timeline: str | os.PathLike[str] | None = None,
        devices: Any = None,
        **mode_options: Any,
    ) -> None:
        super().__init__()
        try:
            options = options_for_fit(
                mode,
                schedule=schedule,
                memory_limit_bytes=memory_limit_bytes,
                profile_steps=profile_steps,
                timeline=timeline,
                devices=devices,
                **mode_options,
            )
        except OptionsError as error:
            in_short(error)
            raise
        self._life = FitLife(mode_for(options))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or copy the options only, as a callback that has trained nothing: tuners copy callbacks."""
        return type(self), (self._life.mode.options,)

    @property
    def report(self) -> Report:
        """Return the report on the model trained last: what was found, planned and measured."""
        return self._life.mode.describe()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Put the mode's training in the place of the model's train function."""
        self._life.begin(self.model, self.params)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Have ranks, if there are several, agree on the steps of the epoch."""
        self._life.epoch_begin(epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count the samples before validation resets them; ranks average an evaluation of its own."""
        self._life.test_begin(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average ``logs`` over all ranks, for the callbacks listed after this one."""
        self._life.epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Put the model's own train function back and write the timeline."""
        self._life.finish()
