"""The modes: which one an option, a launcher or a compiled step asks for.  Nobody else knows them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tf_ooo.compat import tf_functions
from tf_ooo.errors import BackendError
from tf_ooo.fit.controller import StepController
from tf_ooo.fit.mode import Mode
from tf_ooo.hosts.device_names import over_hosts
from tf_ooo.hosts.ranks.engine import launched_for_collectives, launched_with_workers
from tf_ooo.modes.data_parallel.fit import DataParallelMode
from tf_ooo.modes.layerpipe.fit import LayerPipeMode
from tf_ooo.modes.pipeline.fit import PipelineMode
from tf_ooo.modes.replicated import ReplicatedPipelineMode
from tf_ooo.modes.single_device import fit as single_device
from tf_ooo.options import Options
from tf_ooo.report.report import Report


def mode_for(options: Options) -> Mode:
    """The mode that trains a model's ``fit``.

    Raises:
        BackendError: ``mode="layerpipe"`` in one of several launched processes.
    """
    return _MODES[options.mode](options)


def function_controller(
    stock: Callable[..., Any],
    compiled: bool,
    options: Options,
    report: Report,
    on_decided: Callable[[], None],
) -> StepController:
    """The controller of a decorated function.

    Args:
        stock: as TensorFlow runs it.
        compiled: XLA compiles it.
        options, report, on_decided: see :class:`StepController`.

    Raises an OOOError: why it cannot be rewritten.
    """
    if compiled:
        from tf_ooo.modes.compiled.controller import for_function  # noqa: PLC0415 - imports TensorFlow's XLA ops

        plain = tf_functions.undecorated(stock)  # conditions and loops over tensors are those of stock
        return for_function(plain, stock, options, report, on_decided)
    return single_device.controller_of_function(stock, options, report, on_decided)


def _model_controller(
    model: Any, stock: Callable[..., Any], options: Options, report: Report
) -> StepController:
    if model.jit_compile is True:
        from tf_ooo.modes.compiled.controller import for_model  # noqa: PLC0415 - imports TensorFlow's XLA ops

        return for_model(model, stock, options, report)
    return single_device.controller_of_model(model, stock, options, report)


def _single_device(options: Options) -> Mode:
    return single_device.SingleDeviceMode(options, _model_controller)


def _auto(options: Options) -> Mode:
    return DataParallelMode(options) if launched_with_workers() else _single_device(options)


def _pipeline(options: Options) -> Mode:
    replicated = _several_trainings(options) or (options.replicas or 1) > 1
    return ReplicatedPipelineMode(options) if replicated else PipelineMode(options)


def _layerpipe(options: Options) -> Mode:
    if _several_trainings(options):
        raise BackendError(
            "mode='layerpipe' is one process with several devices or hosts (devices=), but several were "
            "launched, whose weights would differ; start python train.py once, without a launcher"
        )
    return LayerPipeMode(options)


def _several_trainings(options: Options) -> bool:
    """Whether a launcher started several trainings; TF_CONFIG may also be for the hosts of ``devices``."""
    return launched_with_workers() or (not over_hosts(options.devices) and launched_for_collectives())


_MODES: Mapping[str, Callable[[Options], Mode]] = {
    "auto": _auto,
    "single_device": _single_device,
    "data_parallel": DataParallelMode,
    "pipeline": _pipeline,
    "layerpipe": _layerpipe,
}
