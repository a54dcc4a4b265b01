"""What data parallel needs of a communication library."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np


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
