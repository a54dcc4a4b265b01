"""Defines options of ``mode="data_parallel"``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tf_ooo.options import RankOptions, TaskOptions
from tf_ooo.options.base import folder, option, whole_number, yes_no_or_none


@dataclass(frozen=True, kw_only=True)
class DataParallel(RankOptions, TaskOptions):
    """Holds options of data parallel training: each process trains on its own data; gradients are averaged.

    >>> callback = tf_ooo.OOOBackprop(tf_ooo.DataParallel(compression="fp16", lockstep="execution"))

    Schedules, which order computation and communication: ``"auto"``, ``"in_order"``, ``"fast_forward"``,
    ``"reverse_first_k"``, ``"search"``.  How ranks are averaged: :class:`tf_ooo.options.RankOptions`; what
    XLA compiles: :class:`tf_ooo.options.TaskOptions`.

    Attributes:
        unroll: at most so many of the model's ``steps_per_execution`` go into one graph, in which a step
            begins before all of the last is done; 1: Keras' own loop; None: 2 to 16, fewer of a large step.
        k: reverse_first_k: how many layers' dW wait; None: chosen by simulation from measured costs.
        compare: also measure some steps without the other ranks, then undo them, so that the report says how
            much faster all train than one; None: if that takes less than 5% of the fit.
        dump_dir: folder for the graph after every pass, written by rank 0; None writes nothing.
    """

    mode: ClassVar[str] = "data_parallel"
    why_not: ClassVar[Mapping[str, str]] = {
        "memory_limit_bytes": "does not go with mode='data_parallel' in this release; leave it out"
    }

    unroll: int | None = option(None, whole_number(1, optional=True))
    k: int | None = option(None, whole_number(0, optional=True), of_policy=True)
    compare: bool | None = option(None, yes_no_or_none)
    dump_dir: str | os.PathLike[str] | None = option(None, folder)
