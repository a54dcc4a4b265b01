"""Is a barrier on an activation worth what it costs?  Calculated, for a published device.

Behind a barrier a tensor is computed once and kept; who reads it reads memory.  That costs nothing where
it is in memory anyway: a matrix product or convolution made it or reads it.  Else XLA would have merged what
makes it into its readers' kernels, and each of them now reads the tensor, made by a kernel more.
What it buys is that the dW that read it can start when their dO is there, not when the last kernel is
that XLA computes the tensor in again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tf_ooo.costs.analytic import op_work
from tf_ooo.costs.devices import DeviceModel, device
from tf_ooo.errors import CostError
from tf_ooo.modes.compiled.outline import Call
from tf_ooo.modes.compiled.regions import CONTRACTIONS, VIEWS, FlatStep, Port

DEVICE = "h100"


def is_worth_it(
    step: FlatStep, port: Port, readers: Iterable[str], calls: Sequence[Call], on: DeviceModel | None = None
) -> bool:
    """Whether the readers of a stored tensor should read it behind the barrier, too.

    Args:
        step: the graph.
        port: the tensor.
        readers: ops of the main stream that would read it from memory.
        calls: those that read it: what could start earlier.
        on: the device; None: ``DEVICE``.
    """
    on = on or device(DEVICE)
    return cost_s(step, port, readers, on) <= gain_s(step, port, calls, on)


def cost_s(step: FlatStep, port: Port, readers: Iterable[str], on: DeviceModel) -> float:
    """Seconds for reading the tensor once more in each reader, and for the kernel that writes it."""
    if step.nodes[_maker(step, port[0])].op in CONTRACTIONS:
        return 0.0
    types = [step.nodes[name].op for name in readers]
    if not types or any(op in CONTRACTIONS for op in types):
        return 0.0
    info = step.info(port)
    if info is None or info.shape is None:
        return 0.0
    size_bytes = math.prod(dim or 0 for dim in info.shape) * _element_bytes(info.dtype)
    return (len(types) + 1) * size_bytes / on.bytes_per_s + on.launch_s


def gain_s(step: FlatStep, port: Port, calls: Sequence[Call], on: DeviceModel) -> float:
    """Seconds of the dW that wait for the tensor: what may run beside the main stream."""
    names = [name for call in calls if port in call.region.inputs for name in call.region.own]
    return sum(_seconds(step, name, on) for name in names if step.nodes[name].op in CONTRACTIONS)


def _maker(step: FlatStep, name: str) -> str:
    """The op behind views."""
    while step.nodes[name].op in VIEWS and (made_of := step.data_inputs(name)):
        name = made_of[0][0]
    return name


def _seconds(step: FlatStep, name: str, on: DeviceModel) -> float:
    inputs = [step.info(port) for port in step.data_inputs(name)]
    try:
        return on.seconds(op_work(step.nodes[name], inputs, step.outputs[name]))
    except CostError:
        return math.inf  # nothing is known of it: as before there were costs


def _element_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
