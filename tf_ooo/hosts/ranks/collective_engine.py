"""Uses TensorFlow's own collective operations between the workers that TF_CONFIG names."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from grappler_passes.compat import runtime
from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine, adasum, restored
from tf_ooo.hosts.ranks.launch import place_in_tf_config
from tf_ooo.hosts.ranks.rendezvous import meet_at

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

_GROUP = 0x7F000  # far from the keys that tf.distribute counts up from 1
_COLLECTIVES, _INSTANCE_KEY = ("CollectiveReduceV2", "CollectiveGatherV2"), 3  # ops and which of their inputs
# A gradient may have this many rows, as an exponent of two; and so many instances can be told apart.
_POWERS, _NUMBERED = 31, "Add"
_BLOCKS = 0x7FFFFFFF // _POWERS
_LOST = ("Collective ops is aborted", "UNAVAILABLE", "UnavailableError", "failed to connect", "Socket closed")


class CollectiveEngine(Engine):
    """Uses a ``CollectiveReduceV2`` for each dense gradient, and gathers all ranks' rows of IndexedSlices.

    Raises BackendError: TensorFlow has computed something already; collectives must be set up first.
    """

    name = "collectives"

    def __init__(self) -> None:
        import tensorflow as tf

        self.rank, addresses = place_in_tf_config()
        self.size = len(addresses)
        hosts = [address.rsplit(":", 1)[0] for address in addresses]
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self._keys: dict[int, str] = {}
        self.roll = meet_at(addresses[0], self.rank, self.size)
        # TensorFlow waits for a rank that lives, as one does whose script goes on or that hangs at its end.
        self.roll.start(runtime.abort_collectives)
        try:
            # Never entered: it sets the cluster up, starts this worker's server and watches the others.
            with self.all_needed():
                self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        except tf.errors.UnavailableError as error:
            raise self.roll.lost_before_training() from error
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"TensorFlow's collectives did not start ({error}); call tf_ooo.data_parallel.connect() "
                "before the first tensor or model is made"
            ) from error

    def combine(self, packed: tf.Tensor, name: str, op: str, like: tf.Tensor) -> tf.Tensor:
        if op == "Adasum":  # every rank gets all gradients, each in a row of its own, and combines them
            return restored(adasum(self._gather(packed[None], name), self.size), like)
        reduced = restored(self.sum(packed, name), like)
        return reduced / self.size if op == "Average" else reduced

    def _gather(self, part: tf.Tensor, name: str, number: tf.Tensor | None = None) -> tf.Tensor:
        """Return the rows of all ranks, as many of each.

        No constant depends on the rank: TensorFlow might merge it with an equal one on this rank only, and
        then ranks would have different graphs.
        """
        import tensorflow as tf

        # Collectives do not gather bfloat16; float32 holds its values.
        wide = tf.float32 if part.dtype == tf.bfloat16 else part.dtype
        rows = self._collective(tf.raw_ops.CollectiveGatherV2, tf.cast(part, wide), name, number)
        return tf.cast(tf.ensure_shape(rows, [None, *part.shape[1:]]), part.dtype)

    def gather_rows(self, slices: tf.IndexedSlices, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        # A collective gathers equally many rows of each rank, always the same number: so the rows are padded
        # to a power of two, each of which has an instance key of its own.
        import tensorflow as tf

        count = tf.shape(slices.indices)[0]
        counts = tf.ensure_shape(self._gather(count[None], f"{name}_counts"), [self.size])
        powers = tf.constant([2**exponent for exponent in range(_POWERS)])
        exponent = tf.reduce_sum(tf.cast(powers < tf.reduce_max(counts), tf.int32))
        most = powers[exponent]
        there = tf.reshape(tf.sequence_mask(counts, most), [-1])

        def gathered(part: tf.Tensor, what: str) -> tf.Tensor:
            padding = tf.concat([[[0, most - count]], tf.zeros([tf.rank(part) - 1, 2], tf.int32)], 0)
            padded = tf.ensure_shape(tf.pad(part, padding), [None, *part.shape[1:]])
            return tf.boolean_mask(self._gather(padded, f"{name}_{what}", exponent), there)

        return gathered(slices.values, "values"), gathered(slices.indices, "indices")

    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        import tensorflow as tf

        return self._collective(tf.raw_ops.CollectiveReduceV2, tensor, name, merge_op="Add", final_op="Id")

    def _collective(
        self,
        op: Callable[..., tf.Tensor],
        tensor: tf.Tensor,
        name: str,
        number: tf.Tensor | None = None,
        **attributes: str,
    ) -> tf.Tensor:
        """Return the collective op; among several instances the one of that number."""
        import tensorflow as tf

        # Within a graph a name is used once; two of the same name get the graph's numbering.
        eager = tf.executing_eagerly()
        unique = name if eager else tf.compat.v1.get_default_graph().unique_name(name, mark_as_used=False)
        key = tf.constant(self._key_of(f"{unique} {tensor.dtype.name} {tensor.shape}"))
        return op(
            input=tensor,
            group_size=tf.constant(self.size),
            group_key=tf.constant(_GROUP),
            instance_key=key if number is None else tf.raw_ops.Add(x=key, y=number),
            ordering_token=[],
            name=name,
            **attributes,
        )

    def _key_of(self, text: str) -> int:
        """Return the first of a tensor's keys, one per power: equal on all ranks, in every trace."""
        block = zlib.crc32(text.encode()) % _BLOCKS
        while self._keys.setdefault(block, text) != text:
            block = (block + 1) % _BLOCKS
        return block * _POWERS

    def renumber(self, graph_def: graph_pb2.GraphDef, number: int) -> None:
        """Give each copy of a collective another instance key: copies may run at the same time."""
        nodes = {node.name: node for node in graph_def.node}
        for node in [node for node in graph_def.node if number and node.op in _COLLECTIVES]:
            key_node = nodes[node.input[_INSTANCE_KEY]]
            key_node = nodes[key_node.input[0]] if key_node.op == _NUMBERED else key_node
            key = key_node.attr["value"].tensor
            key.int_val[0] = self._key_of(f"{key.int_val[0]} of copy {number}")

    def broadcast_bytes(self, data: np.ndarray) -> np.ndarray:
        return self._sum_bytes(data if self.rank == 0 else np.zeros_like(data), "broadcast")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = np.zeros(self.size, np.int32)
        lengths[self.rank] = len(data)
        lengths = self._run(lengths, "lengths")
        rows = np.zeros((self.size, int(lengths.max())), np.uint8)
        rows[self.rank, : len(data)] = np.frombuffer(data, np.uint8)
        rows = self._sum_bytes(rows.reshape(-1), "values").reshape(rows.shape)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _sum_bytes(self, data: np.ndarray, name: str) -> np.ndarray:
        """Add bytes, nonzero on at most one rank, as integers, which collectives can add."""
        padded = np.pad(data, (0, -len(data) % 4)).view(np.int32)
        return self._run(padded, name).view(np.uint8)[: len(data)]

    def _run(self, values: np.ndarray, name: str) -> np.ndarray:
        import tensorflow as tf

        total: np.ndarray = self.sum(tf.constant(values), f"tf_ooo_{name}").numpy()
        return total

    def is_lost(self, error: BaseException) -> bool:
        return any(text in f"{type(error).__name__}: {error}" for text in _LOST)
