"""What data parallel needs of a communication library, and which library to take."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.horovod_cache import launched
from tf_ooo.hosts.ranks.names import ENGINES

# Where launchers say how many processes they have started; srun with PMIx has Slurm's variable only.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class Engine(ABC):
    """The processes of one training and how they talk.  Rank 0 speaks for all where one has to.

    Every method that communicates must be called by all ranks, in the same order.

    Attributes:
        name: horovod, collectives or single.
        rank, size: this process among all of them.
        local_rank: this process among those of its machine; the GPU to use.
    """

    name: str
    rank: int
    size: int
    local_rank: int

    @abstractmethod
    def allreduce(self, gradients: Sequence[tuple[str, Any]], op: str, compression: str) -> list[Any]:
        """Gradients combined over all ranks, in the graph that is being traced (or eagerly).

        Args:
            gradients: (name, tensor or IndexedSlices); the same names and shapes on all ranks.
            op: ``Average``, ``Sum`` or ``Adasum``.
            compression: what floating-point values travel as: ``none``, ``fp16`` or ``bf16``.

        Raises BackendError where the engine cannot do it.
        """

    @abstractmethod
    def sum(self, tensor: Any, name: str) -> Any:
        """The sum of a small tensor over all ranks, in the graph that is being traced."""

    @abstractmethod
    def broadcast_bytes(self, data: Any) -> Any:
        """Rank 0's array of uint8; ``data`` has the same length on all ranks.  Blocks."""

    @abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank gave, by rank; lengths may differ.  Blocks."""

    def gather(self, value: Any) -> list[Any]:
        """A small value of JSON types from each rank, by rank.  Blocks."""
        if self.size == 1:
            return [value]
        packed = json.dumps(value, sort_keys=True).encode()
        return [json.loads(data) for data in self.gather_bytes(packed)]

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.gather(None)

    def broadcast(self, values: Sequence[Any]) -> list[Any]:
        """Rank 0's values of a list of arrays that have the same shapes on all ranks."""
        arrays = [np.asarray(value, order="C") for value in values]
        if self.size == 1:
            return arrays
        out = []
        for group in _groups(arrays, limit_bytes=64 << 20):
            flat = np.concatenate([array.reshape(-1).view(np.uint8) for array in group])
            received, begin = self.broadcast_bytes(flat), 0
            for array in group:
                part = received[begin : begin + array.nbytes]
                out.append(np.frombuffer(part.tobytes(), array.dtype).reshape(array.shape))
                begin += array.nbytes
        return out

    def renumber(self, graph_def: Any, number: int) -> None:  # noqa: B027 - most engines tell ops by name
        """Gives the communications of the ``number``-th copy of a traced step an identity of their own.

        Changes ``graph_def``.
        """

    def is_lost(self, error: BaseException) -> bool:
        """Whether ``error`` says that another process or the connection to it is gone."""
        return False


def _groups(arrays: Sequence[Any], limit_bytes: int) -> list[list[Any]]:
    """Neighbours together up to ``limit_bytes``; an array is never cut."""
    groups: list[list[Any]] = []
    room = -1
    for array in arrays:
        if array.nbytes > room:
            groups.append([])
            room = limit_bytes
        groups[-1].append(array)
        room -= array.nbytes
    return groups


def launched_by_horovod() -> bool:
    """Whether horovodrun (or the environment it sets) started this process, or ``hvd.init()`` was called."""
    if launched():
        return True
    basics = sys.modules.get("horovod.tensorflow")
    return basics is not None and bool(basics.is_initialized())


def _horovod_is_alone() -> bool:
    """Whether ``hvd.init()`` was called in a process that no launcher of Horovod's started."""
    return "HOROVOD_SIZE" not in os.environ and sys.modules["horovod.tensorflow"].size() == 1


def mpi_size() -> int:
    """How many processes MPI's or Slurm's launcher (mpirun, srun) started, as it tells them; else 1."""
    told = (os.environ.get(name, "") for name in _SIZES)
    return max((int(size) for size in told if size.isdecimal()), default=1)


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
