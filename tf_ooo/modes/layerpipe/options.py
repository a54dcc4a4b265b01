"""Defines options of ``mode="layerpipe"``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tf_ooo.options import DeviceOptions
from tf_ooo.options.base import choice, folder, option, whole_number

WEIGHTS = ("stash", "ema", "latest")


@dataclass(frozen=True, kw_only=True)
class LayerPipe(DeviceOptions):
    """Holds options of LayerPipe, which runs F, dO and dW of different batches on different devices.

    >>> callback = tf_ooo.OOOBackprop(tf_ooo.LayerPipe(devices=4, weights="stash"))

    Gradients are late by request.  Schedules: ``"auto"``, ``"layerpipe"``, ``"pipedream"``.  Devices and
    costs: :class:`tf_ooo.options.DeviceOptions`.

    Attributes:
        unroll: how many batches one call of a function takes and trains; None: 8, fewer of a large step.
        weights: the weights with which a backward pass multiplies: ``"stash"`` (those of its forward pass,
            exact), ``"ema"`` (rebuilt from a moving average of the updates) or ``"latest"``.
        drain_steps: every so many batches no batch enters before all earlier ones are done, so that a
            checkpoint taken then holds all their updates; None: at the ends of epochs only.
        dump_dir: folder for the graph after every pass, and for each range of rounds one in it; None writes
            nothing.
    """

    mode: ClassVar[str] = "layerpipe"
    why_not: ClassVar[Mapping[str, str]] = {
        "microbatches": "is not for mode='layerpipe': each batch stays whole",
        "memory_limit_bytes": "is not for mode='layerpipe', which could not keep to it",
    }

    unroll: int | None = option(None, whole_number(1, optional=True))
    weights: str = option("stash", choice(WEIGHTS))
    drain_steps: int | None = option(None, whole_number(1, optional=True))
    dump_dir: str | os.PathLike[str] | None = option(None, folder)
