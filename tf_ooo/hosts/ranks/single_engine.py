"""One process: nothing to communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_ooo.hosts.ranks.base import Engine


class SingleEngine(Engine):
    """Just trains."""

    name, rank, size, local_rank = "single", 0, 1, 0

    def allreduce(self, gradients: Sequence[tuple[str, Any]], op: str, compression: str) -> list[Any]:
        """The gradients as they are."""
        return [gradient for _, gradient in gradients]

    def sum(self, tensor: Any, name: str) -> Any:
        return tensor

    def broadcast_bytes(self, data: Any) -> Any:
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]
