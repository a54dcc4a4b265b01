"""Horovod: Gloo between CPUs, NCCL between GPUs, whatever its build has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_ooo.errors import BackendError
from tf_ooo.hosts.horovod_cache import remember_names
from tf_ooo.hosts.ranks.adasum import adasum, check_ranks
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.compression import compressed, restored
from tf_ooo.hosts.ranks.mpi import mpi_size

# What Horovod's errors contain when a process or the connection to it is gone.
_LOST = ("Horovod has been shut down", "HorovodInternalError", "Connection closed by peer", "gloo", "NCCL")


class HorovodEngine(Engine):
    """Calls ``hvd.init()`` if nobody has.

    Dense gradients are one ``hvd.allreduce`` each, IndexedSlices two allgathers, as in Horovod's own
    tape: the same bits.  The names of these ops are the same on all ranks.

    Raises:
        BackendError: Horovod is not installed, or it cannot reach the other processes.
    """

    name = "horovod"

    def __init__(self) -> None:
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise BackendError(f"Horovod cannot be imported ({error}); see docs/data_parallel.md") from error
        _fill_in_environment()
        if not hvd.is_initialized():
            remember_names()
            try:
                hvd.init()
            except Exception as error:
                raise BackendError(f"Horovod did not start: {error}") from error
        if hvd.size() == 1 < mpi_size():
            raise BackendError(
                f"mpirun or srun started {mpi_size()} processes, which Horovod does not find (built with "
                f"MPI: {'yes' if hvd.mpi_enabled() else 'no'}): each would train alone; start them with "
                "horovodrun --gloo, or build Horovod with the launcher's MPI; engine='single' if each is to "
                "train alone"
            )
        self._hvd = hvd
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()

    def allreduce(self, gradients: Sequence[tuple[str, Any]], op: str, compression: str) -> list[Any]:
        """One ``HorovodAllreduce`` each."""
        return [self._allreduce(name, gradient, op, compression) for name, gradient in gradients]

    def _allreduce(self, name: str, gradient: Any, op: str, compression: str) -> Any:
        import tensorflow as tf

        if isinstance(gradient, tf.IndexedSlices) and op != "Adasum":
            return self._allgather_slices(name, gradient, op)
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        packed = compressed(gradient, compression)
        if op == "Adasum":
            check_ranks(self.size)
            if not self._hvd.mpi_enabled():
                return restored(self._own_adasum(name, packed), gradient)
        if packed.dtype == tf.bfloat16:
            return restored(self._allreduce_bf16(name, packed, op), gradient)
        return restored(self._hvd.allreduce(packed, op=getattr(self._hvd, op), name=name), gradient)

    def _own_adasum(self, name: str, tensor: Any) -> Any:
        """Horovod has Adasum over MPI only; over Gloo every rank gets all gradients and combines them."""
        rows = self._allgather_values(tensor[None], name)
        return adasum([rows[rank] for rank in range(self.size)])

    def _allgather_slices(self, name: str, slices: Any, op: str) -> Any:
        import tensorflow as tf

        values = self._allgather_values(slices.values, f"{name}_values")
        indices = self._hvd.allgather(slices.indices, name=f"{name}_indices")
        values = values / tf.cast(self.size, values.dtype) if op == "Average" else values
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _allgather_values(self, values: Any, name: str) -> Any:
        """Horovod does not know bfloat16; its bits can travel as another type."""
        import tensorflow as tf

        if values.dtype != tf.bfloat16:
            return self._hvd.allgather(values, name=name)
        return tf.bitcast(self._hvd.allgather(tf.bitcast(values, tf.uint16), name=name), tf.bfloat16)

    def _allreduce_bf16(self, name: str, tensor: Any, op: str) -> Any:
        """Horovod cannot add bfloat16, but it can move it: every rank adds one slice in float32."""
        import tensorflow as tf

        count = tf.size(tensor)
        padded = tf.pad(tf.reshape(tensor, [-1]), [[0, -count % self.size]])
        mine = self._hvd.alltoall(tf.bitcast(padded, tf.uint16), name=f"{name}_slices")
        rows = tf.cast(tf.reshape(tf.bitcast(mine, tf.bfloat16), [self.size, -1]), tf.float32)
        total = tf.reduce_sum(rows, axis=0)
        total = total / self.size if op == "Average" else total
        packed = tf.bitcast(tf.cast(total, tf.bfloat16), tf.uint16)
        whole = tf.bitcast(self._hvd.allgather(packed, name=f"{name}_whole"), tf.bfloat16)
        return tf.reshape(whole[:count], tf.shape(tensor))

    def sum(self, tensor: Any, name: str) -> Any:
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name)

    def broadcast_bytes(self, data: Any) -> Any:
        return self._hvd.broadcast(data, root_rank=0, name="tf_ooo_broadcast").numpy()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self._hvd.allgather(np.array([len(data)], np.int64), name="tf_ooo_lengths").numpy()
        packed = self._hvd.allgather(np.frombuffer(data, np.uint8), name="tf_ooo_values").numpy()
        parts = np.split(packed, np.cumsum(lengths)[:-1])
        return [part.tobytes() for part in parts]

    def is_lost(self, error: BaseException) -> bool:
        return any(text.lower() in f"{type(error).__name__}: {error}".lower() for text in _LOST)


def _fill_in_environment() -> None:
    """Started by hand with HOROVOD_RANK and HOROVOD_SIZE only: one machine, Gloo."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:
        return
    rank, size = os.environ.get("HOROVOD_RANK", "0"), os.environ.get("HOROVOD_SIZE", "1")
    defaults = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_LOCAL_RANK": rank,
        "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
    if "HOROVOD_LOCAL_RANK" not in os.environ:
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
