"""Defines the table of modes: the options of each, and what trains by them. Only this file names modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.devices import over_hosts
from tf_ooo.hosts.ranks.launch import launched_by_horovod, launched_for_collectives, launched_with_workers
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.pipeline.options import Pipeline
from tf_ooo.modes.single_device.options import SingleDevice
from tf_ooo.options import DeviceOptions, ModeOptions

if TYPE_CHECKING:
    import keras

    from tf_ooo.fit.controller import StepController
    from tf_ooo.fit.mode import Mode
    from tf_ooo.report.report import Report

__all__ = [
    "MODES",
    "DataParallel",
    "LayerPipe",
    "Pipeline",
    "SingleDevice",
    "function_controller",
    "mode_for",
]
# ruff: noqa: PLC0415 - a mode, and with it TensorFlow, is imported when it is asked for


def mode_for(options: ModeOptions) -> Mode:
    """Return the mode that trains in ``fit``. BackendError: ``"layerpipe"`` in one of several processes."""
    make = _MAKERS.get(type(options))
    if make is None:
        raise OptionsError(
            f"{options!r} are the options of no mode; accepted: tf_ooo.Pipeline(...) and the like"
        )
    return make(options)


def function_controller(
    stock: Callable[..., Any],
    compiled: bool,
    options: SingleDevice,
    report: Report,
    on_decided: Callable[[], None],
) -> StepController:
    """Return the controller of a decorated function. OOOError: it cannot be rewritten."""
    if compiled:
        from tf_ooo.compat import tf_functions
        from tf_ooo.modes.compiled.controller import for_function

        plain = tf_functions.undecorated(stock)  # conditions and loops over tensors are those of stock
        return for_function(plain, stock, options, report, on_decided)
    from tf_ooo.modes.single_device.fit import controller_of_function

    return controller_of_function(stock, options, report, on_decided)


def _model_controller(
    model: keras.Model, stock: Callable[..., Any], options: SingleDevice, report: Report
) -> StepController:
    if model.jit_compile is True:
        from tf_ooo.modes.compiled.controller import for_model

        return for_model(model, stock, options, report)
    from tf_ooo.modes.single_device.fit import controller_of_model

    return controller_of_model(model, stock, options, report)


def _single_device(options: SingleDevice) -> Mode:
    from tf_ooo.modes.single_device.fit import SingleDeviceMode

    return SingleDeviceMode(options, _model_controller)


def _data_parallel(options: DataParallel) -> Mode:
    from tf_ooo.modes.data_parallel.fit import DataParallelMode

    return DataParallelMode(options)


def _pipeline(options: Pipeline) -> Mode:
    if _several_trainings(options):
        from tf_ooo.modes.replicated import ReplicatedPipelineMode

        return ReplicatedPipelineMode(options)
    if not launched_by_horovod():  # horovodrun -np 1 runs the script of several replicas
        options.refuse_averaging()
    from tf_ooo.modes.pipeline.mode import PipelineMode

    return PipelineMode(options)


def _layerpipe(options: LayerPipe) -> Mode:
    if _several_trainings(options):
        raise BackendError(
            "mode='layerpipe' is one process with several devices or hosts (devices=), but several were "
            "launched, whose weights would differ; start python train.py once, without a launcher"
        )
    from tf_ooo.modes.layerpipe.fit import LayerPipeMode

    return LayerPipeMode(options)


def _several_trainings(options: DeviceOptions) -> bool:
    """Say whether a launcher started several trainings; TF_CONFIG may also be for hosts of ``devices``."""
    return launched_with_workers() or (not over_hosts(options.devices) and launched_for_collectives())


_MAKERS: Mapping[type[ModeOptions], Callable[[Any], Mode]] = {
    SingleDevice: _single_device,
    DataParallel: _data_parallel,
    Pipeline: _pipeline,
    LayerPipe: _layerpipe,
}
MODES: Mapping[str, type[ModeOptions]] = {options.mode: options for options in _MAKERS}
