"""Measures a message between devices that both compute: it waits for a thread and, on a share of a processor,
for its turn: milliseconds, once for each hop of a pipeline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tf_ooo.compat import keras_variables
from tf_ooo.costs.layer_costs import Link

# Products of so large matrices, so many to a segment that it takes about so long.
_WIDTH, _SEGMENT_S = 256, 0.03
_ROUNDS, _MESSAGE_BYTES = 4, 256 * 1024


def busy_latency_s(
    tf: ModuleType, sender: str, receiver: str, link: Link, product_s: float, repeats: int
) -> float:
    """Return seconds of a message, less those that it occupies the link; not below the idle link's."""
    products = max(4, round(_SEGMENT_S / max(product_s, 1e-6)))
    alone, sending = (_in_turns(tf, sender, receiver, products, size) for size in (0, _MESSAGE_BYTES))
    for function in (alone, sending):
        function().numpy()
    pairs = [(seconds_of(alone), seconds_of(sending)) for _ in range(repeats)]
    # Without messages both devices compute 2 n segments side by side; with them there are 2 n - 1 hops, and
    # the second device begins a segment later.
    segments = 2 * _ROUNDS
    hop_s = statistics.median((s - a * (segments + 1) / segments) / (segments - 1) for a, s in pairs)
    known_s = link.occupied_s(_MESSAGE_BYTES) + 2 * link.overhead_s_per_byte * _MESSAGE_BYTES
    return max(link.latency_s, hop_s - known_s)


def _in_turns(tf: ModuleType, sender: str, receiver: str, products: int, size: int) -> Callable[[], Any]:
    there, back = (_Segments(tf, name, products, size) for name in (sender, receiver))

    def function() -> Any:
        messages: list[Any] = []
        there.last = back.last = None
        for _ in range(_ROUNDS):
            done = there.segment(there.arrived(messages))
            messages = [there.message(done)] if size else []
            done = back.segment(back.arrived(messages))
            messages = [back.message(done)] if size else []
            there.segment([])
            back.segment([])
        with tf.device(sender):
            return tf.add_n([there.last[0, 0], back.last[0, 0]])

    turns: Callable[[], Any] = tf.function(function, autograph=False)
    return turns


class _Segments:
    """Segments of computation on one device, one after the other."""

    def __init__(self, tf: ModuleType, name: str, products: int, size: int) -> None:
        self._tf, self._name, self._products = tf, name, products
        self._matrix = keras_variables.zeros_on(name, tf.float32, (_WIDTH, _WIDTH))
        self._sent = keras_variables.zeros_on(name, tf.float32, (max(1, size // 4),))
        self.last: Any = None

    def segment(self, after: Sequence[Any]) -> Any:
        """Begins after the one before, and after tensors of this device."""
        before = [] if self.last is None else [self.last]
        with self._tf.device(self._name), self._tf.control_dependencies([*before, *after]):
            factor = product = self._matrix.read_value()
        with self._tf.device(self._name):
            for _ in range(self._products):
                product = self._tf.matmul(product, factor)
        self.last = product
        return product

    def message(self, after: object) -> Any:
        with self._tf.device(self._name), self._tf.control_dependencies([after]):
            return self._sent.read_value()

    def arrived(self, messages: Sequence[Any]) -> list[Any]:
        """Something on this device that waits for each message."""
        with self._tf.device(self._name):
            return [message[0] for message in messages]


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the seconds until what it returns is there."""
    started = time.perf_counter()
    function().numpy()
    return time.perf_counter() - started
