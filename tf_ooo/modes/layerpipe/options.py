"""Options of ``mode="layerpipe"``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tf_ooo.errors import OptionsError
from tf_ooo.options import DeviceOptions
from tf_ooo.options.checks import choice, folder, option, whole_number
from tf_ooo.planning.policies import offers

WEIGHTS = ("stash", "ema", "latest")


@dataclass(frozen=True, kw_only=True)
class LayerPipe(DeviceOptions):
    """Forward, dO and dW of different batches on different devices; gradients are late by request.

    >>> callback = tf_ooo.OOOBackprop(tf_ooo.LayerPipe(devices=4, weights="stash"))

    Schedules: ``"auto"``, ``"layerpipe"``, ``"pipedream"``, ``"pipedream_2bw"``.  Devices and costs:
    :class:`tf_ooo.options.DeviceOptions`.

    Attributes:
        unroll: so many batches are taken and trained in one call of a function; None: 8, fewer of a large
            step.
        weights: which weights a backward pass multiplies with: ``"stash"`` (those of its forward pass,
            exact), ``"ema"`` (rebuilt from a moving average of the updates) or ``"latest"``.
        drain_steps: no batch comes in before all before it are done, every so many batches, so that a
            checkpoint taken then holds all their updates; None: at the ends of epochs only.
        rate_warmup_steps: in the first so many steps learning rates are smaller, the more the later a layer's
            gradients are (docs/layerpipe.md); None: not.
        accumulate_steps: pipedream_2bw: so many batches' gradients are one update; None: the fewest for which
            two versions of the weights do, 2 (P - 1) on P devices, at least P.
        dump_dir: folder for the graph after every pass, and for each range of rounds one in it; None writes
            nothing.
    """

    mode: ClassVar[str] = "layerpipe"
    why_not: ClassVar[Mapping[str, str]] = {
        "microbatches": "is not for mode='layerpipe': each batch stays whole; accumulate_steps= of "
        "schedule='pipedream_2bw' makes one update of several batches",
        "memory_limit_bytes": "is not for mode='layerpipe', which could not keep to it",
    }

    unroll: int | None = option(None, whole_number(1, optional=True))
    weights: str = option("stash", choice(WEIGHTS))
    drain_steps: int | None = option(None, whole_number(1, optional=True))
    rate_warmup_steps: int | None = option(None, whole_number(1, optional=True))
    accumulate_steps: int | None = option(None, whole_number(1, optional=True), of_policy=True)
    dump_dir: str | os.PathLike[str] | None = option(None, folder)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not offers(self.schedule, "accumulate_steps"):
            return
        if self.weights != "stash":
            raise OptionsError(
                f"weights={self.weights!r} is not for schedule={self.schedule!r}, which keeps two versions"
            )
        if self.rate_warmup_steps is not None:
            raise OptionsError(
                f"rate_warmup_steps= is not for schedule={self.schedule!r}, whose gradients are all one "
                "update late; a LearningRateSchedule can warm up itself"
            )
