"""Trains data parallel: every process has its own part of the data, gradients are averaged.

>>> from tf_ooo import data_parallel
>>> engine = data_parallel.connect()
>>> x, y = data_parallel.shard(x, y)
>>> model.fit(x, y, callbacks=[tf_ooo.OOOBackprop(mode="data_parallel")])
"""

from __future__ import annotations

from typing import Any

from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.engine import choose_engine
from tf_ooo.hosts.ranks.launch import launched_with_workers

__all__ = ["Engine", "connect", "launched_with_workers", "shard"]


def connect(engine: str = "auto") -> Engine:
    """Join the other processes; ``.rank``, ``.size`` and ``.local_rank`` say which this one is.

    ``OOOBackprop`` calls it by itself.  Call it to know the rank earlier; with TensorFlow's collectives call
    it before the first tensor is made, as they must be set up first.
    """
    return choose_engine(engine)


def shard(*arrays: Any, engine: str = "auto") -> Any:
    """Return this rank's part of each array: rows rank, rank + size, ...; as many on all ranks.

    Up to ``size - 1`` rows at the end are left out.
    """
    ranks = choose_engine(engine)
    parts = [array[ranks.rank : len(array) - len(array) % ranks.size : ranks.size] for array in arrays]
    return parts[0] if len(parts) == 1 else tuple(parts)
