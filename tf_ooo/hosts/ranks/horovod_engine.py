"""Uses Horovod: Gloo between CPUs, NCCL between GPUs, whatever its build has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine, adasum, restored
from tf_ooo.hosts.ranks.launch import mpi_size, remember_names
from tf_ooo.hosts.ranks.rendezvous import meet_by_horovods_server

if TYPE_CHECKING:
    import tensorflow as tf

# Horovod's errors contain one of these when a process or the connection to it is gone.
_LOST = (
    "Horovod has been shut down",
    "Horovod has not been initialized",
    "HorovodInternalError",
    "Connection closed by peer",
    "gloo",
    "NCCL",
)


class HorovodEngine(Engine):
    """Calls ``hvd.init()`` if nobody has; reduces as Horovod's own tape does, to the same bits.

    BackendError: Horovod is not installed, or it cannot reach the other processes.
    """

    name = "horovod"

    def __init__(self) -> None:
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise BackendError(f"Horovod cannot be imported ({error}); see docs/data_parallel.md") from error
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise BackendError(
                "Horovod elastic changes the ranks of a training under way, which this cannot follow: start "
                "it with tf-ooo run --ranks N --max-restarts 3, which goes on from the last checkpoint"
            )
        _fill_in_environment()
        self.roll = meet_by_horovods_server(begun=hvd.is_initialized())
        if self.roll is not None:
            # Horovod waits for a rank that lives, as one does whose script goes on.
            self.roll.start(lambda who: hvd.shutdown())
        if not hvd.is_initialized():
            remember_names()
            try:
                # It waits for a lost rank without a word, and then aborts the process.
                with self.all_needed():
                    hvd.init()
            except Exception as error:
                if self.roll is not None and self.is_lost(error) and self.who_ended():
                    raise self.roll.lost_before_training() from error
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

    def combine(self, packed: tf.Tensor, name: str, op: str, like: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        if op == "Adasum" and not self._hvd.mpi_enabled():
            # Horovod has Adasum over MPI only; over Gloo every rank gets all gradients and combines them.
            combined = adasum(self._allgather(packed[None], name), self.size)
        elif packed.dtype == tf.bfloat16:
            combined = self._allreduce_bf16(name, packed, op)
        else:
            combined = self._hvd.allreduce(packed, op=getattr(self._hvd, op), name=name)
        return restored(combined, like)

    def gather_rows(self, slices: tf.IndexedSlices, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        values = self._allgather(slices.values, f"{name}_values")
        return values, self._hvd.allgather(slices.indices, name=f"{name}_indices")

    def _allgather(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Gather values; bfloat16, which Horovod does not know, travels as another type of the same size."""
        import tensorflow as tf

        if values.dtype != tf.bfloat16:
            return self._hvd.allgather(values, name=name)
        return tf.bitcast(self._hvd.allgather(tf.bitcast(values, tf.uint16), name=name), tf.bfloat16)

    def _allreduce_bf16(self, name: str, tensor: tf.Tensor, op: str) -> tf.Tensor:
        """Reduce bfloat16, which Horovod can move but not add: every rank adds one slice in float32."""
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

    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name)

    def broadcast_bytes(self, data: np.ndarray) -> np.ndarray:
        received: np.ndarray = self._hvd.broadcast(data, root_rank=0, name="tf_ooo_broadcast").numpy()
        return received

    def gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self._hvd.allgather(np.array([len(data)], np.int64), name="tf_ooo_lengths").numpy()
        packed = self._hvd.allgather(np.frombuffer(data, np.uint8), name="tf_ooo_values").numpy()
        parts = np.split(packed, np.cumsum(lengths)[:-1])
        return [part.tobytes() for part in parts]

    def is_lost(self, error: BaseException) -> bool:
        return any(text.lower() in f"{type(error).__name__}: {error}".lower() for text in _LOST)


def _fill_in_environment() -> None:
    """Fill in variables missing beside HOROVOD_RANK and HOROVOD_SIZE, set by hand: one machine, Gloo."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ or "HOROVOD_LOCAL_RANK" in os.environ:
        return
    defaults = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_LOCAL_RANK": os.environ.get("HOROVOD_RANK", "0"),
        "HOROVOD_LOCAL_SIZE": os.environ.get("HOROVOD_SIZE", "1"),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
