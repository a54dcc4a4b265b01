"""Whether the process that trains has the memory for all of a model that its devices share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_optimizers, keras_variables
from tf_ooo.errors import BackendError
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.memory import in_host_memory
from tf_ooo.hosts.system_memory import available_bytes
from tf_ooo.modes.pipeline.options import Pipeline
from tf_ooo.tracing.variables import bytes_of

if TYPE_CHECKING:
    import keras

# No optimizer has as many slots for a weight: with more than that nothing has to be counted.
_ENOUGH = 8


def check_host_memory(model: keras.Model, options: Pipeline) -> None:
    """BackendError: what is made before the first step would not fit beside the weights; nothing is made yet.

    The slots of the model's optimizer stay in this process while stages train with copies; gradients are
    there where the first steps run whole, on this host's CPU.  A model without weights is not looked at, nor
    is one on a GPU, nor an optimizer that cannot be made again from its settings.
    """
    weights = model.trainable_weights if model.built else []
    if not weights or not all(map(_in_this_process, weights)):
        return
    weight_bytes, available = bytes_of(weights), available_bytes()
    if available is None or available.bytes > _ENOUGH * weight_bytes:
        return
    slots = _slots(model, weights)
    gradient_bytes = weight_bytes if _runs_whole_here(model, options) else 0
    needed_bytes = bytes_of(slots) + gradient_bytes
    if needed_bytes <= available.bytes:
        return
    name = type(model.optimizer).__name__
    parts = [f"{bytes_of(slots)} bytes for the slots of {name}"] if slots else []
    parts += [f"{gradient_bytes} for gradients"] if gradient_bytes else []
    raise BackendError(
        f"this process has {weight_bytes} bytes of trainable weights and needs {' and '.join(parts)} beside "
        f"them, but {available.bytes} bytes are {available.said}: {needed_bytes - available.bytes} more "
        f"would do; {_ways_out(bool(slots), bool(gradient_bytes))}"
    )


def _ways_out(slots: bool, gradients: bool) -> str:
    ways = ["train on a machine, or in a group, with more memory"]
    ways += ["take an optimizer with fewer slots"] if slots else []
    ways += ["build the model in tf_ooo.host_memory(), so that no step runs whole here"] if gradients else []
    return ", or ".join(ways)


def _slots(model: keras.Model, weights: Sequence[Any]) -> Sequence[Any]:
    """What the model's optimizer will have; empty: it has it, or nobody knows."""
    optimizer = getattr(model, "optimizer", None)
    if not keras_optimizers.is_optimizer(optimizer):
        return ()
    return keras_optimizers.to_be_built(optimizer, weights) or ()


def _runs_whole_here(model: keras.Model, options: Pipeline) -> bool:
    """Whether the first steps do, on this host's CPU."""
    if options.first_steps == "cut" or ":CPU:" not in home_device():
        return False
    return options.first_steps == "whole" or not in_host_memory(model)


def _in_this_process(variable: Any) -> bool:
    value = keras_variables.value_of(variable)
    return value is not None and ":CPU:" in value.device and "/job:worker/" not in value.device
