"""How this process was launched, and which communication library that means."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.horovod_cache import launched
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.mpi import mpi_size
from tf_ooo.hosts.ranks.names import ENGINES

__all__ = [
    "Engine",
    "choose_engine",
    "launched_by_horovod",
    "launched_for_collectives",
    "launched_with_workers",
    "mpi_size",
    "resolved_name",
]


def launched_by_horovod() -> bool:
    """Whether horovodrun (or the environment it sets) started this process, or ``hvd.init()`` was called."""
    if launched():
        return True
    basics = sys.modules.get("horovod.tensorflow")
    return basics is not None and bool(basics.is_initialized())


def _horovod_is_alone() -> bool:
    """Whether ``hvd.init()`` was called in a process that no launcher of Horovod's started."""
    return "HOROVOD_SIZE" not in os.environ and sys.modules["horovod.tensorflow"].size() == 1


def launched_for_collectives() -> bool:
    """Whether TF_CONFIG describes a cluster of more than one worker."""
    cluster = _tf_config().get("cluster") or {}
    return len(cluster.get("worker", [])) + len(cluster.get("chief", [])) > 1


def _tf_config() -> dict[str, Any]:
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    except ValueError as error:
        raise BackendError(f"TF_CONFIG is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def launched_with_workers() -> bool:
    """Whether ``mode="auto"`` means data parallel here: a launcher started more than one process."""
    if launched():
        return os.environ["HOROVOD_SIZE"] != "1"
    if launched_by_horovod():
        return bool(sys.modules["horovod.tensorflow"].size() > 1)
    return False


_made: dict[str, Engine] = {}


def resolved_name(name: str) -> str:
    """The engine that ``"auto"`` is in this process."""
    if name != "auto":
        return name
    if launched_by_horovod() and not (_horovod_is_alone() and launched_for_collectives()):
        return "horovod"
    if launched_for_collectives():
        return "collectives"
    return "horovod" if mpi_size() > 1 else "single"


def choose_engine(name: str = "auto") -> Engine:
    """The engine of this process; the same object every time.

    Args:
        name: ``"auto"``: Horovod if its launcher started this process, else TensorFlow's collectives
            if TF_CONFIG names several workers, Horovod if mpirun or srun started several processes, else one
            process.

    Raises:
        BackendError: the engine is not installed, or was not launched.
    """
    name = resolved_name(name)
    if name not in _made:
        _made[name] = _make(name)
    return _made[name]


def _make(name: str) -> Engine:
    if name == "horovod":
        from tf_ooo.hosts.ranks.horovod_engine import HorovodEngine

        return HorovodEngine()
    if name == "collectives":
        from tf_ooo.hosts.ranks.collective_engine import CollectiveEngine

        return CollectiveEngine(_tf_config())
    if name == "single":
        from tf_ooo.hosts.ranks.single_engine import SingleEngine

        return SingleEngine()
    raise OptionsError(f"engine={name!r} is not accepted; accepted: {', '.join(ENGINES)}")
