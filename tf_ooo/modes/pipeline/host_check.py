"""Checks that the process that trains has the memory for all of a model that its devices share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_optimizers, keras_variables
from tf_ooo.errors import BackendError
from tf_ooo.hosts.addresses import over_hosts
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.memory import in_host_memory
from tf_ooo.hosts.system_memory import available_bytes
from tf_ooo.modes.pipeline.options import Pipeline
from tf_ooo.tracing.variables import bytes_of

if TYPE_CHECKING:
    import keras

# No optimizer has as many slots for a weight: with more than that nothing has to be counted.
_ENOUGH = 8
# Tracing and TensorFlow's graphs with their optimizers take so much: for 10 to 20 dense layers 280 to 310 MB.
_GRAPH_BYTES = 280_000_000
# These shares of the bytes of weights were measured there: what is on its way to workers in the same moment;
# gradients, which stages that run here also hold as sums.
_SENT, _WHOLE, _COMPUTED_HERE = 0.5, 1.0, 1.4


def check_host_memory(model: keras.Model, options: Pipeline) -> None:
    """BackendError: what is made before the first step would not fit beside the weights; nothing is made yet.

    The slots of the model's optimizer stay in this process while stages train with copies.  Beside them come
    graphs, what is on its way to workers, and gradients where stages, or the whole first steps, run on this
    host's CPU.  A model without weights is not looked at, nor is one on a GPU, nor an optimizer that cannot
    be made again from its settings.
    """
    weights = model.trainable_weights if model.built else []
    if not weights or not all(map(_in_this_process, weights)):
        return
    weight_bytes, available = bytes_of(weights), available_bytes()
    if available is None or available.bytes > _ENOUGH * weight_bytes:
        return
    slots = _slots(model, weights)
    whole = _runs_whole_here(model, options)
    working_bytes = _GRAPH_BYTES + round(_per_weight(options, whole) * weight_bytes)
    needed_bytes = bytes_of(slots) + working_bytes
    if needed_bytes <= available.bytes:
        return
    of_slots = (
        f"{bytes_of(slots)} bytes for the slots of {type(model.optimizer).__name__} and " if slots else ""
    )
    raise BackendError(
        f"this process has {weight_bytes} bytes of trainable weights and needs {of_slots}about "
        f"{working_bytes} bytes for gradients, messages and graphs beside them, but {available.bytes} are "
        f"{available.said}: about {needed_bytes - available.bytes} more would do; "
        f"{_ways_out(bool(slots), whole)}"
    )


def _per_weight(options: Pipeline, whole: bool) -> float:
    if over_hosts(options.devices):
        return _WHOLE if whole else _SENT
    return _COMPUTED_HERE if ":CPU:" in home_device() else 0.0


def _ways_out(slots: bool, whole: bool) -> str:
    ways = ["train on a machine, or in a group, with more memory"]
    ways += ["take an optimizer with fewer slots"] if slots else []
    ways += ["build the model in tf_ooo.host_memory(), so that no step runs whole here"] if whole else []
    return ", or ".join(ways)


def _slots(model: keras.Model, weights: Sequence[Any]) -> Sequence[Any]:
    """Return the slots that the model's optimizer will have; empty: it has them, or nobody knows."""
    optimizer = getattr(model, "optimizer", None)
    if not keras_optimizers.is_optimizer(optimizer):
        return ()
    return keras_optimizers.to_be_built(optimizer, weights) or ()


def _runs_whole_here(model: keras.Model, options: Pipeline) -> bool:
    """Return whether the first steps run whole, on this host's CPU."""
    if options.first_steps == "cut" or ":CPU:" not in home_device():
        return False
    return options.first_steps == "whole" or not in_host_memory(model)


def _in_this_process(variable: keras.Variable) -> bool:
    value = keras_variables.value_of(variable)
    return value is not None and ":CPU:" in value.device and "/job:worker/" not in value.device
