"""Measures a TensorFlow cluster: seconds of messages, and of the same work on each device."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import tensorflow as tf

from grappler_passes.compat import runtime
from tf_ooo.compat import keras_variables
from tf_ooo.costs.communication import MEASURED_BYTES, fit_link
from tf_ooo.costs.devices import DeviceModel
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.profile import usable_cores
from tf_ooo.errors import CostError

# Measures a message between devices that both compute: it waits for a thread and, if a processor is shared,
# for its turn: milliseconds, once for each hop of a pipeline.

# Products of so large matrices, so many to a segment that it takes about so long.
_WIDTH, _SEGMENT_S = 256, 0.03
_ROUNDS, _BUSY_BYTES = 4, 256 * 1024


def busy_latency_s(sender: str, receiver: str, link: Link, product_s: float, repeats: int) -> float:
    """Return the seconds of a message, less those on the link; not below the idle link's latency."""
    products = max(4, round(_SEGMENT_S / max(product_s, 1e-6)))
    alone, sending = (_warm(_in_turns(sender, receiver, products, size)) for size in (0, _BUSY_BYTES))
    pairs = [(seconds_of(alone), seconds_of(sending)) for _ in range(repeats)]
    # Without messages both devices compute 2 n segments side by side; with them there are 2 n - 1 hops, and
    # the second device begins a segment later.
    segments = 2 * _ROUNDS
    hop_s = statistics.median((s - a * (segments + 1) / segments) / (segments - 1) for a, s in pairs)
    known_s = link.occupied_s(_BUSY_BYTES) + 2 * link.overhead_s_per_byte * _BUSY_BYTES
    return max(link.latency_s, hop_s - known_s)


def _in_turns(sender: str, receiver: str, products: int, size: int) -> Callable[[], Any]:
    there, back = (_Segments(name, products, size) for name in (sender, receiver))

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
    """Holds segments of computation on one device, one after the other."""

    def __init__(self, name: str, products: int, size: int) -> None:
        self._name, self._products = name, products
        self._matrix = keras_variables.zeros_on(name, tf.float32, (_WIDTH, _WIDTH))
        self._sent = keras_variables.zeros_on(name, tf.float32, (max(1, size // 4),))
        self.last: Any = None

    def segment(self, after: Sequence[Any]) -> Any:
        """Start a segment after the one before, and after tensors of this device."""
        before = [] if self.last is None else [self.last]
        with tf.device(self._name), tf.control_dependencies([*before, *after]):
            factor = product = self._matrix.read_value()
        with tf.device(self._name):
            for _ in range(self._products):
                product = tf.matmul(product, factor)
        self.last = product
        return product

    def message(self, after: object) -> Any:
        with tf.device(self._name), tf.control_dependencies([after]):
            return self._sent.read_value()

    def arrived(self, messages: Sequence[Any]) -> list[Any]:
        """Return for each message a value on this device that waits for it."""
        with tf.device(self._name):
            return [message[0] for message in messages]


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the seconds of a function until its result is there."""
    started = time.perf_counter()
    function().numpy()
    return time.perf_counter() - started


def _warm(function: Callable[[], Any]) -> Callable[[], Any]:
    function().numpy()
    return function


_HOPS = 8
# The computation beside which messages are sent: products of so large matrices, about so long.
_COMPUTING_S = 0.1
# Messages are to be through before the computation is.
_SENDING_SHARE = 0.4
_MESSAGE_BYTES, _LEAST_BYTES = 1024**2, 256 * 1024
# Between devices of one process a tensor is handed over, not copied; seconds that the executors take.
_HAND_OVER_S = 30e-6


def link_between(names: Sequence[str]) -> Link:
    """Return the measured link between neighbouring devices, the slowest if they differ.

    Within one memory nothing is measured.  Raises CostError if a device does not answer.
    """
    links = [measure_device_link(a, b) for a, b in itertools.pairwise(names) if not _one_memory(a, b)]
    if not links:
        return Link(_HAND_OVER_S if len(names) > 1 else 0.0)
    return Link(
        max(x.latency_s for x in links),
        min(x.bytes_per_s for x in links),
        max(x.overhead_s_per_byte for x in links),
    )


def sharing_cores(link: Link, names: Sequence[str], hosts: Sequence[str]) -> Link:
    """Return the link of devices for which CPUs of one host share its cores, on all hosts alike.

    There messages take their time from the shared cores, and count as their work.
    """
    places = [host if ":CPU:" in name else name for name, host in zip(names, hosts, strict=True)]
    machines = tuple(map(places.index, places))
    different = len(set(machines))
    if different == len(machines):
        return link
    overhead = link.overhead_s_per_byte if different > 1 else 0.0
    near = link.near and replace(link.near, overhead_s_per_byte=0.0)
    return replace(link, overhead_s_per_byte=overhead, machines=machines, cores=usable_cores(), near=near)


def _one_memory(a: str, b: str) -> bool:
    """Return whether both are CPUs of one process."""
    return _computing(a) == _computing(b) and "/device:CPU" in a


def measure_device_link(
    sender: str, receiver: str, sizes: Sequence[int] = MEASURED_BYTES, repeats: int = 5
) -> Link:
    """Send tensors of several sizes to and fro between two devices; fit a link to the times.

    A run makes 8 hops, and one that makes none is taken off, so that what starting a run costs does not count
    as latency.  The time that messages take from computation on either device is measured, too; the latency
    is that between devices that compute.  CostError: no such device, or it does not answer.
    """
    try:
        samples = [(float(x), hop_s) for x in sizes for hop_s in _hop_seconds(sender, receiver, x, repeats)]
        link = fit_link(samples, flat_ok=True)
        link = replace(link, overhead_s_per_byte=measure_overhead_s_per_byte(sender, receiver, link, repeats))
        with runtime.calls_not_optimized():  # or they would take the copies out
            product_s = max(_product_s(at) for at in (sender, receiver))
            busy_s = busy_latency_s(sender, receiver, link, product_s, min(repeats, 3))
    except CostError:
        raise
    except (tf.errors.OpError, ValueError) as error:
        raise CostError(f"link {sender} - {receiver}: cannot be measured: {error}") from error
    return replace(link, latency_s=busy_s)


def measure_overhead_s_per_byte(sender: str, receiver: str, link: Link, repeats: int = 5) -> float:
    """Return the seconds by which a computation is longer for each byte that its device exchanges.

    It is the mean of both ends; 0 if the link is too slow for messages to arrive in time.
    """
    with runtime.calls_not_optimized():
        ends_s = [_overhead_s_per_byte(sender, receiver, at, link, repeats) for at in (sender, receiver)]
    return statistics.mean(ends_s)


def _overhead_s_per_byte(sender: str, receiver: str, computing: str, link: Link, repeats: int) -> float:
    product_s = max(_product_s(computing), 1e-6)
    count = min(512, max(8, round(_COMPUTING_S / product_s)))
    total_bytes = int(_SENDING_SHARE * count * product_s * min(link.bytes_per_s, 1e11))
    if total_bytes < _LEAST_BYTES:
        return 0.0
    size = min(_MESSAGE_BYTES, total_bytes)
    messages = min(32, total_bytes // size)
    beside = _warm(_beside_messages(sender, receiver, computing, count, messages, size))
    alone = _warm(_beside_messages(sender, receiver, computing, count, 0, 0))
    longer_s = statistics.median(seconds_of(beside) - seconds_of(alone) for _ in range(repeats))
    return max(0.0, longer_s) / (messages * size)


def _product_s(at: str) -> float:
    short, long = (_warm(_beside_messages(at, at, at, count, 0, 0)) for count in (4, 12))
    return (min(seconds_of(long) for _ in range(3)) - min(seconds_of(short) for _ in range(3))) / 8


def _beside_messages(
    sender: str, receiver: str, computing: str, products: int, messages: int, size: int
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
    with runtime.calls_not_optimized():
        start, end = (_warm(_hops(sender, receiver, size, hops)) for hops in (0, _HOPS))
        empty_s = min(seconds_of(start) for _ in range(repeats))
        return [max(0.0, seconds_of(end) - empty_s) / _HOPS for _ in range(repeats)]


def _hops(sender: str, receiver: str, size: int, hops: int) -> Any:
    """Return a function that sends a tensor to and fro and returns one of its numbers."""

    def function() -> Any:
        with tf.device(sender):
            tensor = tf.random.stateless_uniform((max(1, size // 4),), seed=(1, 2))
        for hop in range(hops):
            with tf.device(sender if hop % 2 else receiver):
                tensor = tf.identity(tensor)
        with tf.device(sender):
            return tensor[0]

    return tf.function(function, autograph=False)


# Products of so large matrices (small ops take a worker's threads longer to begin than to compute), and sums
# over so many numbers.
_CPU_WIDTH, _GPU_WIDTH, _ELEMENTS = 1536, 8192, 16 * 1024**2
# The shorter of two calls takes so long, the other one three times; a CPU quota's period is 0.1 s.
_SHORT_S, _REPEATS = 0.07, 3
# Two measurements of one device may differ by so much on a machine that does other things.
_ALIKE = 1.4


def relative_speeds(devices: Sequence[str], hosts: Sequence[str], home: str) -> tuple[float, ...]:
    """Return each device's speed, relative to ``home``; (): all are as fast as that.

    Speeds that differ by less than 40% count as equal, and CPUs of one process are equal.  Only if there are
    other devices are speeds measured: on all hosts at once, on one host's devices one after the other.
    ``hosts`` says where each device is.  CostError: a device does not answer.
    """
    host_of = {_computing(name): host for name, host in zip(devices, hosts, strict=True)}
    host_of.pop(_computing(home), None)
    if not host_of:
        return ()
    own_rate = _rate(home)  # by itself: it may have a host in common with others
    rates = {_computing(home): own_rate, **_rates(host_of)}
    speeds = levels({name: rate / own_rate for name, rate in rates.items()})
    own = tuple(speeds[_computing(name)] for name in devices)
    return () if set(own) == {1.0} else own


def levels(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return one speed for all that are alike, 1 for those near 1, so that noise does not move a cut."""
    groups: list[list[str]] = []
    for name in sorted(speeds, key=speeds.__getitem__):
        if not groups or speeds[name] >= _ALIKE * speeds[groups[-1][0]]:
            groups.append([])
        groups[-1].append(name)
    out: dict[str, float] = {}
    for names in groups:
        mean = sum(speeds[name] for name in names) / len(names)
        out |= dict.fromkeys(names, 1.0 if 1 / _ALIKE < mean < _ALIKE else float(f"{mean:.2g}"))
    return out


@functools.cache
def measured_model(device: str) -> DeviceModel:
    """Return this process' device with its measured rates, to calculate seconds from shapes.

    Measured once.  CostError: it does not answer.
    """
    moved_bytes = 2 * 4 * _ELEMENTS  # read and written
    return DeviceModel(
        flop_per_s=_rate(device),
        bytes_per_s=_of_device(device, (_ELEMENTS,), lambda value, zeros: value + 1.0, moved_bytes),
        name=f"{device.rsplit('/device:', 1)[-1]} of this process, measured",
    )


def _computing(name: str) -> str:
    """Return the device that stands for all with the same cores: the first CPU of a process."""
    process, kind = name.rsplit("/device:", 1)
    return f"{process}/device:CPU:0" if kind.startswith("CPU") else name


def _rates(host_of: Mapping[str, str]) -> dict[str, float]:
    on_host: defaultdict[str, list[str]] = defaultdict(list)
    for name, host in host_of.items():
        on_host[host].append(name)
    with ThreadPoolExecutor(len(on_host)) as pool:
        rates = pool.map(lambda names: [(name, _rate(name)) for name in names], on_host.values())
        return dict(itertools.chain.from_iterable(rates))


def _rate(device: str) -> float:
    """Return floating-point operations a second, measured with matrix products."""
    width = _CPU_WIDTH if ":CPU:" in device else _GPU_WIDTH
    return _of_device(device, (width, width), lambda value, zeros: value @ zeros, 2.0 * width**3)


def _of_device(device: str, shape: tuple[int, ...], once: Callable[[Any, Any], Any], each: float) -> float:
    """Return how much the device does in a second, if one repetition does ``each``."""
    try:
        return each * _per_second(_repeated(device, shape, once))
    except (tf.errors.OpError, ValueError) as error:
        raise CostError(f"speed of {device}: cannot be measured: {error}") from error


def _per_second(function: Any) -> float:
    """Return how many repetitions a function runs in a second, given a count.

    The constant cost of a call, tens of milliseconds on a worker, is taken off by a call with a small count.
    """

    def seconds(count: int) -> float:
        return seconds_of(lambda: function(tf.constant(count)))

    count = 1
    seconds(count)  # the kernels' first run
    called_s = seconds(count)
    while (taken_s := seconds(3 * count) - called_s) < _SHORT_S / 4:
        count *= 3
    few = max(1, round(2 * count * _SHORT_S / taken_s))
    many = 3 * few
    # Whatever else the machine does makes calls longer only.
    short_s, long_s = (min(seconds(times) for _ in range(_REPEATS)) for times in (few, many))
    return (many - few) / max(long_s - short_s, 1e-9)


def _repeated(device: str, shape: tuple[int, ...], once: Callable[[Any, Any], Any]) -> Any:
    """Return a function that repeats ``once`` as often as told, and returns one number of the result."""
    variable = keras_variables.zeros_on(device, tf.float32, shape)

    def function(count: Any) -> Any:
        with tf.device(device):
            zeros = variable.read_value()

            def body(index: Any, value: Any) -> tuple[Any, Any]:
                return index + 1, once(value, zeros)

            _, result = tf.while_loop(lambda index, _: index < count, body, (tf.constant(0), zeros))
            return tf.reshape(result, [-1])[0]

    signature = tf.TensorSpec((), tf.int32)
    # Called as it was traced: TensorFlow would warn that there are several.
    concrete = tf.function(function, autograph=False).get_concrete_function(signature)
    concrete.reads = variable  # it does not keep it itself
    return concrete
