"""Chooses the engine of this process."""

from __future__ import annotations

import functools

from tf_ooo.errors import OptionsError
from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.hosts.ranks.launch import ENGINES, resolved_name


def choose_engine(name: str = "auto") -> Engine:
    """Return the engine of this process; the same object every time.

    ``"auto"`` is Horovod if its launcher started this process, else TensorFlow's collectives if TF_CONFIG
    names several workers, Horovod if mpirun or srun started several processes, else one process.
    BackendError: the engine is not installed, or was not launched.
    """
    return _make(resolved_name(name))


@functools.cache
def _make(name: str) -> Engine:
    if name == "horovod":
        from tf_ooo.hosts.ranks.horovod_engine import HorovodEngine

        return HorovodEngine()
    if name == "collectives":
        from tf_ooo.hosts.ranks.collective_engine import CollectiveEngine

        return CollectiveEngine()
    if name == "single":
        return SingleEngine()
    raise OptionsError(f"engine={name!r} is not accepted; accepted: {', '.join(ENGINES)}")
