"""Defines the interface of a communication library, and one process, which needs none."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.roll import Roll

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

    Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"


OPS = ("Average", "Sum", "Adasum")
COMPRESSIONS = ("none", "fp16", "bf16")


def compressed(tensor: tf.Tensor, compression: str) -> tf.Tensor:
    """Return the tensor cast to the 16-bit type of ``compression``, except integers and 16-bit floats."""
    import tensorflow as tf

    if compression == "none" or not tensor.dtype.is_floating or tensor.dtype.size <= 2:
        return tensor
    return tf.cast(tensor, tf.float16 if compression == "fp16" else tf.bfloat16)


def restored(tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return the tensor cast back to the type of ``like``."""
    import tensorflow as tf

    return tensor if tensor.dtype == like.dtype else tf.cast(tensor, like.dtype)


def check_ranks(size: int) -> None:
    """Raise BackendError unless ``size`` is a power of two: Adasum combines gradients in pairs."""
    if size & (size - 1):
        raise BackendError(f"op='Adasum' needs 2, 4, 8, ... ranks, not {size}; use 'Average'")


def adasum(gradients: tf.Tensor, ranks: int) -> tf.Tensor:
    """Add the common part of two ranks' gradients once, and the rest of both (Maleki et al., 2021).

    The order is Horovod's: rank 0 with 1, 2 with 3, then the pairs.  ``gradients``: a row for each rank.
    """
    level = [gradients[rank] for rank in range(ranks)]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _pair(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return ``(1 - ab / 2aa) a + (1 - ab / 2bb) b``; sums in float64."""
    import tensorflow as tf

    x, y = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    both = tf.reduce_sum(x * y)
    of_x = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(x * x))
    of_y = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(y * y))
    return tf.cast(of_x * x + of_y * y, a.dtype)


@dataclass(frozen=True)
class Message:
    """Is the base of all messages. Tuples arrive as lists."""

    def encoded(self) -> dict[str, Any]:
        """Return the message as JSON types, with the name of its kind."""
        return {"kind": type(self).__name__, **asdict(self)}

    def told(self, engine: Engine) -> list[Any]:
        """Return every rank's message, all of this kind, unless some ranks do something else. Blocks."""
        kinds = {kind.__name__: kind for kind in Message.__subclasses__()}
        return [kinds[said.pop("kind")](**said) for said in map(dict, engine.gather(self.encoded()))]


class Engine(ABC):
    """Holds the processes of one training and their communication. Rank 0 speaks for all where needed.

    Every method that communicates must be called by all ranks, in the same order.

    Attributes:
        name: horovod, collectives or single.
        rank, size: this process' number, and how many there are.
        local_rank: this process' number on its machine, which is the GPU to use.
        roll: knows the other ranks; None: one process, or a launcher without a place to meet (MPI).
    """

    name: str
    rank: int
    size: int
    local_rank: int
    roll: Roll | None = None

    def allreduce(
        self, gradients: Sequence[tuple[str, Gradient]], op: str, compression: str
    ) -> list[Gradient]:
        """Return the named gradients combined over all ranks, in the traced graph (or eagerly).

        Names and shapes are the same on all ranks; IndexedSlices get all ranks' rows, as in Horovod's tape.
        Raises BackendError where the engine cannot do it.
        """
        if op == "Adasum":
            check_ranks(self.size)
        return [self._allreduce(name, gradient, op, compression) for name, gradient in gradients]

    def _allreduce(self, name: str, gradient: Gradient, op: str, compression: str) -> Gradient:
        import tensorflow as tf

        if isinstance(gradient, tf.IndexedSlices) and op != "Adasum":
            values, indices = self.gather_rows(gradient, name)
            values = values / tf.cast(self.size, values.dtype) if op == "Average" else values
            return tf.IndexedSlices(values, indices, gradient.dense_shape)
        dense = tf.convert_to_tensor(gradient)
        return self.combine(compressed(dense, compression), name, op, dense)

    @abstractmethod
    def combine(self, packed: tf.Tensor, name: str, op: str, like: tf.Tensor) -> tf.Tensor:
        """Return all ranks' dense gradient in the type of ``like``; ``packed``: this rank's, as sent."""

    @abstractmethod
    def gather_rows(self, slices: tf.IndexedSlices, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Return all ranks' values, and their indices."""

    @abstractmethod
    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of a small tensor over all ranks, in the graph that is being traced."""

    @abstractmethod
    def broadcast_bytes(self, data: np.ndarray) -> np.ndarray:
        """Return rank 0's array of uint8; ``data`` has the same length on all ranks. Blocks."""

    @abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank; lengths may differ. Blocks."""

    def gather(self, value: object) -> list[Any]:
        """Return a small value of JSON types from each rank, by rank.  Blocks."""
        if self.size == 1:
            return [value]
        packed = json.dumps(value, sort_keys=True).encode()
        return [json.loads(data) for data in self.gather_bytes(packed)]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.gather(None)

    def broadcast(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Return rank 0's values of a list of arrays that have the same shapes on all ranks."""
        arrays = [np.asarray(value, order="C") for value in values]
        if self.size == 1:
            return arrays
        out = []
        for group in _groups(arrays, limit_bytes=64 << 20):
            flat = np.concatenate([array.reshape(-1).view(np.uint8) for array in group])
            ends = np.cumsum([array.nbytes for array in group])
            for array, part in zip(group, np.split(self.broadcast_bytes(flat), ends[:-1]), strict=True):
                out.append(np.frombuffer(part.tobytes(), array.dtype).reshape(array.shape))
        return out

    def renumber(self, graph_def: graph_pb2.GraphDef, number: int) -> None:  # noqa: B027 - by name
        """Give communications of the ``number``-th copy of a traced step their own names, in place."""

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this; see :meth:`Roll.wait_for_all`."""
        if self.roll is not None:
            self.roll.wait_for_all()

    def leave(self) -> None:
        """Take note that this rank's fit has ended: it waits for nobody."""
        if self.roll is not None:
            self.roll.in_fit = False

    def all_needed(self) -> AbstractContextManager[None]:
        """Return the context of a block in which a library starts; see :meth:`Roll.all_needed`."""
        return contextlib.nullcontext() if self.roll is None else self.roll.all_needed()

    def say_ended(self, error: BaseException) -> None:
        """Tell the other ranks why this rank trains no more."""
        if self.roll is not None:
            self.roll.say_ended(error)

    def who_ended(self) -> str:
        """Say which rank ended first, and why; empty if nobody knows."""
        return "" if self.roll is None else self.roll.who_ended()

    def is_lost(self, error: BaseException) -> bool:
        """Return whether ``error`` says that another process or the connection to it is gone."""
        return False


def _groups(arrays: Sequence[np.ndarray], limit_bytes: int) -> list[list[np.ndarray]]:
    """Return neighbouring arrays in groups of up to ``limit_bytes``; no array is cut."""
    groups, room = list[list[np.ndarray]](), -1
    for array in arrays:
        if array.nbytes > room:
            groups.append([])
            room = limit_bytes
        groups[-1].append(array)
        room -= array.nbytes
    return groups


class SingleEngine(Engine):
    """Represents a single process, which just trains."""

    name, rank, size, local_rank = "single", 0, 1, 0

    def combine(self, packed: tf.Tensor, name: str, op: str, like: tf.Tensor) -> tf.Tensor:
        return like

    def gather_rows(self, slices: tf.IndexedSlices, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        return slices.values, slices.indices

    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def broadcast_bytes(self, data: np.ndarray) -> np.ndarray:
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


@contextlib.contextmanager
def naming_the_lost(engine: Engine, where: str) -> Iterator[None]:
    """Raise a BackendError for an error that says that another rank is gone; pass other errors on."""
    try:
        yield
    except Exception as error:
        if not engine.is_lost(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if engine.is_lost(RuntimeError(line))]
        said = max(lines, key=len)[:300] if lines else type(error).__name__
        who = engine.who_ended()
        ended = f"ended: {who}" if who else "ended or cannot be reached"
        raise BackendError(
            f"rank {engine.rank} of {engine.size} stopped {where}: another worker {ended}."
            " Restart all workers; with BackupAndRestore or ModelCheckpoint training continues from the last "
            f"file. ({said})"
        ) from error
