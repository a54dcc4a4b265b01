"""The one line in ``model.fit``."""

from __future__ import annotations

import os
from typing import Any

from tf_ooo.compat.callbacks import Callback
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.device_names import over_hosts
from tf_ooo.hosts.ranks.engine import launched_for_collectives, launched_with_workers
from tf_ooo.modes.by_name import Options, options_for_fit
from tf_ooo.modes.data_parallel.fit import DataParallelFit
from tf_ooo.modes.layerpipe.fit import LayerPipeFit
from tf_ooo.modes.pipeline.fit import PipelineFit
from tf_ooo.modes.replicated import ReplicatedPipelineFit
from tf_ooo.modes.single_device.fit import FitSession
from tf_ooo.modes.table import DataParallel, LayerPipe, Pipeline, SingleDevice
from tf_ooo.options import DeviceOptions, ModeOptions
from tf_ooo.report.report import Report


class OOOBackprop(Callback):
    """Reorders the backward pass of the model that is being trained.

    Weights stay the same bits; with several micro-batches or processes they are those of the joint batch, and
    in mode layerpipe gradients are late by request.

    The first steps alternate between the stock and the rewritten step, each training as usual; then
    the faster is kept.  ``fit`` may be called again; the model gets its own train function back.

    Example:
        >>> callback = tf_ooo.OOOBackprop()
        >>> model.fit(x, y, callbacks=[callback])
        >>> print(callback.report.summary())

    Args:
        mode: ``"single_device"``, ``"data_parallel"``, ``"pipeline"``, ``"layerpipe"``, or ``"auto"``:
            data_parallel where horovodrun started several processes.  In the place of a name and all other
            arguments: ``tf_ooo.SingleDevice(...)``, ``DataParallel(...)``, ``Pipeline(...)`` or
            ``LayerPipe(...)``.
        schedule: ``"auto"`` keeps the faster of stock and rewritten; a policy's name is applied as asked.
        memory_limit_bytes: peak bytes that the planned order may keep alive on each device.
        profile_steps: steps of each order that are timed.
        timeline: folder for ``report.html`` and ``trace.json``, written when training ends.
        **mode_options: other options of the mode, such as ``strict``, ``devices``.

    Raises:
        OptionsError: an unknown option or value, or an option of another mode.
        BackendError: ``mode="layerpipe"`` in one of several launched processes.
    """

    def __init__(
        self,
        mode: str | ModeOptions | Options = "auto",
        schedule: str = "auto",
        memory_limit_bytes: int | None = None,
        profile_steps: int = 3,
        timeline: str | os.PathLike[str] | None = None,
        **mode_options: Any,
    ) -> None:
        super().__init__()
        options = options_for_fit(
            mode,
            schedule=schedule,
            memory_limit_bytes=memory_limit_bytes,
            profile_steps=profile_steps,
            timeline=timeline,
            **mode_options,
        )
        self._session = _session(options)

    @property
    def report(self) -> Report:
        """What was found, planned and measured, for the model trained last."""
        return self._session.report

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the controller in the place of the model's train function."""
        self._session.begin(self.model, self.params)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Data parallel: the ranks agree on the steps of the epoch."""
        self._session.epoch_begin(epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Data parallel: takes note of the samples trained on, before validation resets the count."""
        self._session.test_begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Data parallel: averages ``logs`` over all ranks, for the callbacks listed after this one."""
        self._session.epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the model's own train function back and writes the timeline."""
        self._session.finish()


def _session(options: ModeOptions) -> DataParallelFit | FitSession | PipelineFit:
    if isinstance(options, LayerPipe):
        if _one_of_several(options):
            raise BackendError(
                "mode='layerpipe' is one process with several devices or hosts (devices=), but several were "
                "launched, whose weights would differ; start python train.py once, without a launcher"
            )
        return LayerPipeFit(options)
    if isinstance(options, Pipeline):
        replicated = _one_of_several(options) or (options.replicas or 1) > 1
        return ReplicatedPipelineFit(options) if replicated else PipelineFit(options)
    if isinstance(options, DataParallel):
        return DataParallelFit(options)
    if isinstance(options, SingleDevice):
        return FitSession(options)
    raise OptionsError(f"{options!r} are the options of no mode; accepted: tf_ooo.Pipeline(...) and the like")


def _one_of_several(options: DeviceOptions) -> bool:
    """Whether a launcher started several trainings; TF_CONFIG may also be for the hosts of ``devices``."""
    return launched_with_workers() or (not over_hosts(options.devices) and launched_for_collectives())
