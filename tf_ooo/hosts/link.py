"""The link between two devices of a TensorFlow cluster, measured through TensorFlow's own runtime."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from grappler_passes.compat import runtime
from tf_ooo.compat import keras_variables
from tf_ooo.costs.busy_latency import busy_latency_s, seconds_of
from tf_ooo.costs.communication import MEASURED_BYTES, fit_link
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.profile import usable_cores
from tf_ooo.errors import CostError

_HOPS = 8
# The computation beside which messages are sent: products of so large matrices, about so long.
_WIDTH, _COMPUTING_S = 256, 0.1
# Messages are to be through before the computation is.
_SENDING_SHARE = 0.4
_MESSAGE_BYTES, _LEAST_BYTES = 1024**2, 256 * 1024
# Between devices of one process a tensor is handed over, not copied; seconds that the executors take.
_HAND_OVER_S = 30e-6


def link_between(names: Sequence[str]) -> Link:
    """The link between neighbouring devices, the slowest where they differ; measured, but within one memory.

    Raises CostError where a device does not answer.
    """
    pairs = [(a, b) for a, b in zip(names, names[1:], strict=False) if not _one_memory(a, b)]
    if not pairs:
        return Link(_HAND_OVER_S if len(names) > 1 else 0.0)
    links = [measure_device_link(a, b) for a, b in pairs]
    return Link(
        max(x.latency_s for x in links),
        min(x.bytes_per_s for x in links),
        max(x.overhead_s_per_byte for x in links),
    )


def sharing_cores(link: Link, names: Sequence[str], hosts: Sequence[str]) -> Link:
    """The link of devices of which the CPUs of one host share its cores; all hosts are taken to be like this.

    There the time that messages take from those that compute is time of these cores, and counts as that.
    """
    places = [host if ":CPU:" in name else name for name, host in zip(names, hosts, strict=True)]
    machines = tuple(places.index(place) for place in places)
    if len(set(machines)) == len(machines):
        return link
    overhead = link.overhead_s_per_byte if len(set(machines)) > 1 else 0.0
    return replace(link, overhead_s_per_byte=overhead, machines=machines, cores=usable_cores())


def _one_memory(a: str, b: str) -> bool:
    """Return whether both are CPUs of one process."""
    host = [name.rsplit("/device:", 1) for name in (a, b)]
    return host[0][0] == host[1][0] and all(part[1].startswith("CPU") for part in host)


def measure_device_link(
    sender: str, receiver: str, sizes: Sequence[int] = MEASURED_BYTES, repeats: int = 5
) -> Link:
    """Sends tensors of some bytes to and fro between two devices of this process, fits a link to the times.

    A run makes 8 hops, and one that makes none is taken off, so that what starting a run costs does not count
    as latency.  What messages take from a computation on either device is measured, too; the latency is that
    between devices that compute.  CostError: no such device, or it does not answer.
    """
    import tensorflow as tf

    try:
        samples = [(float(x), hop_s) for x in sizes for hop_s in _hop_seconds(sender, receiver, x, repeats)]
        link = fit_link(samples, flat_ok=True)
        link = replace(link, overhead_s_per_byte=measure_overhead_s_per_byte(sender, receiver, link, repeats))
        with runtime.calls_not_optimized():  # or they would take the copies out
            product_s = max(_product_s(tf, sender, receiver, at) for at in (sender, receiver))
            busy_s = busy_latency_s(tf, sender, receiver, link, product_s, min(repeats, 3))
    except CostError:
        raise
    except (tf.errors.OpError, ValueError) as error:
        raise CostError(f"link {sender} - {receiver}: cannot be measured: {error}") from error
    return replace(link, latency_s=busy_s)


def measure_overhead_s_per_byte(sender: str, receiver: str, link: Link, repeats: int = 5) -> float:
    """Seconds that a computation takes longer for each byte that its device sends or receives meanwhile.

    The mean of both ends; 0 where the link is too slow for messages to be through in time.
    """
    import tensorflow as tf

    with runtime.calls_not_optimized():
        ends_s = [_overhead_s_per_byte(tf, sender, receiver, at, link, repeats) for at in (sender, receiver)]
    return statistics.mean(ends_s)


def _overhead_s_per_byte(
    tf: ModuleType, sender: str, receiver: str, computing: str, link: Link, repeats: int
) -> float:
    product_s = _product_s(tf, sender, receiver, computing)
    count = min(512, max(8, round(_COMPUTING_S / max(product_s, 1e-6))))
    total_bytes = int(_SENDING_SHARE * count * max(product_s, 1e-6) * min(link.bytes_per_s, 1e11))
    if total_bytes < _LEAST_BYTES:
        return 0.0
    size = min(_MESSAGE_BYTES, total_bytes)
    messages = min(32, total_bytes // size)
    alone = _beside_messages(tf, sender, receiver, computing, count, 0, 0)
    beside = _beside_messages(tf, sender, receiver, computing, count, messages, size)
    for function in (alone, beside):
        function().numpy()
    longer_s = statistics.median(seconds_of(beside) - seconds_of(alone) for _ in range(repeats))
    return max(0.0, longer_s) / (messages * size)


def _product_s(tf: ModuleType, sender: str, receiver: str, computing: str) -> float:
    """Return seconds of one product."""
    short, long = (_beside_messages(tf, sender, receiver, computing, count, 0, 0) for count in (4, 12))
    for function in (short, long):
        function().numpy()
    return (min(seconds_of(long) for _ in range(3)) - min(seconds_of(short) for _ in range(3))) / 8


def _beside_messages(
    tf: ModuleType, sender: str, receiver: str, computing: str, products: int, messages: int, size: int
) -> Any:
    """Return a function that multiplies matrices on one device while messages go from device to device."""
    sent = keras_variables.zeros_on(sender, tf.float32, (max(1, size // 4),))
    matrix = keras_variables.zeros_on(computing, tf.float32, (_WIDTH, _WIDTH))

    def function() -> Any:
        with tf.device(sender):
            # Each is a tensor of its own, or all would be sent as one.
            messages_read = [sent.read_value() for _ in range(messages)]
        with tf.device(receiver):
            arrived = [tensor[0] for tensor in messages_read]
        with tf.device(computing):
            factor = product = matrix.read_value()
            for _ in range(products):
                product = tf.matmul(product, factor)
            return tf.add_n([product[0, 0], *arrived])

    # Called as it was traced: TensorFlow would warn that there are several.
    concrete = tf.function(function, autograph=False).get_concrete_function()
    concrete.reads = sent, matrix  # it does not keep them itself
    return concrete


def _hop_seconds(sender: str, receiver: str, size: int, repeats: int) -> list[float]:
    import tensorflow as tf

    with runtime.calls_not_optimized():
        start, end = _hops(tf, sender, receiver, size, 0), _hops(tf, sender, receiver, size, _HOPS)
        for function in (start, end):
            function().numpy()
        empty_s = min(seconds_of(start) for _ in range(repeats))
        return [max(0.0, seconds_of(end) - empty_s) / _HOPS for _ in range(repeats)]


def _hops(tf: ModuleType, sender: str, receiver: str, size: int, hops: int) -> Any:
    """A function that sends a tensor to and fro and returns one number of it."""

    def function() -> Any:
        with tf.device(sender):
            tensor = tf.random.stateless_uniform((max(1, size // 4),), seed=(1, 2))
        for hop in range(hops):
            with tf.device(sender if hop % 2 else receiver):
                tensor = tf.identity(tensor)
        with tf.device(sender):
            return tensor[0]

    return tf.function(function, autograph=False)
