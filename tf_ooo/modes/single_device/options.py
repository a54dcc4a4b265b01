"""Defines options of ``mode="single_device"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tf_ooo.options import OneDeviceOptions


@dataclass(frozen=True, kw_only=True)
class SingleDevice(OneDeviceOptions):
    """Runs on one device: dO first, dW where it fits; in steps that XLA compiles, dW on streams of its own.

    >>> callback = tf_ooo.OOOBackprop(tf_ooo.SingleDevice(schedule="fast_forward", strict=True))

    Schedules: ``"auto"`` (rewrite, measure both orders, keep the faster), ``"in_order"``, ``"fast_forward"``;
    with jit_compile=True ``"auto"`` and ``"multi_stream"``.  The fields are those of
    :class:`tf_ooo.options.OneDeviceOptions`, which the modules below the modes and compiled steps read, too.
    """

    mode: ClassVar[str] = "single_device"
