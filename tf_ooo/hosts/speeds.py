"""Measures how fast devices compute: seconds of the same work on each of them, where they may differ."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from tf_ooo.compat import keras_variables
from tf_ooo.costs.busy_latency import seconds_of
from tf_ooo.costs.devices import DeviceModel
from tf_ooo.errors import CostError

# Products of so large matrices (small ops take a worker's threads longer to begin than to compute), and sums
# over so many numbers.
_CPU_WIDTH, _GPU_WIDTH, _ELEMENTS = 1536, 8192, 16 * 1024**2
# The shorter of two calls takes so long, the other one three times; a CPU quota's period is 0.1 s.
_SHORT_S, _REPEATS = 0.07, 3
# Two measurements of one device may differ by so much on a machine that does other things.
_ALIKE = 1.4


def relative_speeds(devices: Sequence[str], hosts: Sequence[str], home: str) -> tuple[float, ...]:
    """Return each device's speed, where that of ``home`` is 1; (): all are as fast as that.

    What differs by less than 40% counts as alike.  CPUs of one process are; only where there are other
    devices is anything measured: on all hosts at once, on the devices of one host one after the other.

    Args:
        devices, home: full names.
        hosts: of each device, where it is.

    Raises:
        CostError: a device does not answer.
    """
    at = {_computing(name): host for name, host in zip(devices, hosts, strict=True)}
    if set(at) <= {_computing(home)}:
        return ()
    own_rate = _rate(home)  # by itself: it may have a host in common with others
    rates = {_computing(home): own_rate, **_rates({k: v for k, v in at.items() if k != _computing(home)})}
    speeds = levels({name: rate / own_rate for name, rate in rates.items()})
    own = tuple(speeds[_computing(name)] for name in devices)
    return () if set(own) == {1.0} else own


def levels(speeds: Mapping[str, float]) -> dict[str, float]:
    """The same for all that are about alike, 1 for those that are about 1: what measurements differ by is
    not to decide where a model is cut."""
    groups: list[list[str]] = []
    for name in sorted(speeds, key=lambda name: speeds[name]):
        if groups and speeds[name] < _ALIKE * speeds[groups[-1][0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    out: dict[str, float] = {}
    for names in groups:
        mean = sum(speeds[name] for name in names) / len(names)
        near_one = 1 / _ALIKE < mean < _ALIKE
        out |= dict.fromkeys(names, 1.0 if near_one else float(f"{mean:.2g}"))
    return out


@functools.cache
def measured_model(device: str) -> DeviceModel:
    """Return this process' device with its measured rates, to calculate seconds from shapes.

    Measured once.  CostError: it does not answer.
    """
    moved_bytes = 2 * 4 * _ELEMENTS  # read and written
    return DeviceModel(
        flop_per_s=_rate(device),
        bytes_per_s=_of_device(device, _sums, moved_bytes),
        name=f"{device.rsplit('/device:', 1)[-1]} of this process, measured",
    )


def _computing(name: str) -> str:
    """The device that stands for all that compute with the same cores: of the CPUs of a process the first."""
    process, kind = name.rsplit("/device:", 1)
    return f"{process}/device:CPU:0" if kind.startswith("CPU") else name


def _rates(host_of: Mapping[str, str]) -> dict[str, float]:
    """Return the rate of each device, as :func:`_rate` measures it."""
    on_host: defaultdict[str, list[str]] = defaultdict(list)
    for name, host in host_of.items():
        on_host[host].append(name)

    def of_host(names: Sequence[str]) -> dict[str, float]:
        return {name: _rate(name) for name in names}

    with ThreadPoolExecutor(max(1, len(on_host))) as pool:
        rates = list(pool.map(of_host, on_host.values()))
    return {name: rate for of_names in rates for name, rate in of_names.items()}


def _rate(device: str) -> float:
    """Floating-point operations a second, in products."""
    return _of_device(device, _products, 2.0 * _width(device) ** 3)


def _width(device: str) -> int:
    return _CPU_WIDTH if ":CPU:" in device else _GPU_WIDTH


Work = Callable[[ModuleType, str], Any]


def _of_device(device: str, work: Work, each: float) -> float:
    """Return how much of it the device does in a second, where once is ``each``."""
    import tensorflow as tf

    try:
        function = work(tf, device)
        return each * _per_second(function)
    except (tf.errors.OpError, ValueError) as error:
        raise CostError(f"speed of {device}: cannot be measured: {error}") from error


def _per_second(function: Any) -> float:
    """Return how often it is done in a second; the function takes a count.

    What a call takes besides, tens of milliseconds on a worker, is as much with a small count.
    """
    import tensorflow as tf

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


def _products(tf: ModuleType, device: str) -> Any:
    shape = (_width(device), _width(device))
    return _repeated(tf, device, shape, lambda value, given: tf.matmul(value, given))


def _sums(tf: ModuleType, device: str) -> Any:
    return _repeated(tf, device, (_ELEMENTS,), lambda value, given: value + 1.0)


def _repeated(tf: ModuleType, device: str, shape: tuple[int, ...], once: Callable[[Any, Any], Any]) -> Any:
    """Return a function that does it as often as it is told, and returns one number of the result."""
    zeros = keras_variables.zeros_on(device, tf.float32, shape)

    def function(count: Any) -> Any:
        with tf.device(device):
            given = zeros.read_value()

            def body(index: Any, value: Any) -> tuple[Any, Any]:
                return index + 1, once(value, given)

            _, result = tf.while_loop(lambda index, _: index < count, body, (tf.constant(0), given))
            return tf.reshape(result, [-1])[0]

    signature = tf.TensorSpec((), tf.int32)
    # Called as it was traced: TensorFlow would warn that there are several.
    concrete = tf.function(function, autograph=False).get_concrete_function(signature)
    concrete.reads = zeros  # it does not keep it itself
    return concrete
