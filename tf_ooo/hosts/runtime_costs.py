"""Measures what TensorFlow itself takes for tasks, messages and steps on the devices of several processes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from grappler_passes.compat import runtime
from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import CostError
from tf_ooo.hosts.devices import host_device
from tf_ooo.hosts.speeds import seconds_of

# Two numbers of the same, so that what all calls take is taken off.
_MESSAGES, _SENDS, _TASKS = (2, 18), (2, 14), (32, 160)
_REPEATS = 7
# Between two sends a device computes for about a millisecond, so that one does not wait for the other.
_WIDTH, _PRODUCTS = 256, 2


def with_runtime(link: Link, devices: Sequence[str]) -> Link:
    """Return the link with what the runtime takes on these devices, which was not measured before.

    The messages of a step are all asked for at its beginning, by all devices at once.  What their ends spend
    is no latency.  CostError: a device does not answer.
    """
    try:
        with runtime.calls_not_optimized():
            ends_s, call_s = _line(lambda count: _neighbours(devices, count), _MESSAGES)
            send_s, _ = _line(lambda count: _sends(devices[0], devices[-1], count), _SENDS)
            task_s, _ = _line(lambda count: _tasks(devices[-1], count), _TASKS)
    except (tf.errors.OpError, ValueError) as error:
        raise CostError(f"runtime on {', '.join(devices)}: cannot be measured: {error}") from error
    send_s = min(send_s, ends_s)
    latency_s = max(0.0, link.latency_s - ends_s)
    times = {"send_s": send_s, "receive_s": ends_s - send_s, "task_s": task_s, "step_s": call_s}
    return replace(link, latency_s=latency_s, **times)


def _line(make: Callable[[int], Callable[..., Any]], counts: tuple[int, int]) -> tuple[float, float]:
    """Return the seconds that one more takes, and those of a call without any; neither is below 0."""
    few, many = (_called(make(count)) for count in counts)
    pairs = [(seconds_of(few), seconds_of(many)) for _ in range(_REPEATS)]
    few_s, many_s = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    each_s = max(0.0, many_s - few_s) / (counts[1] - counts[0])
    return each_s, max(0.0, few_s - counts[0] * each_s)


def _called(body: Callable[..., Any]) -> Callable[[], Any]:
    """Return a call that was made before; what it is given is not known when it is traced."""
    given = tf.constant(1.0)
    concrete = tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec((), tf.float32))
    concrete(given).numpy()
    return lambda: concrete(given)


def _neighbours(devices: Sequence[str], messages: int) -> Callable[[Any], Any]:
    """Each device sends so many tensors to the next one, the last to the first, as soon as it begins."""

    def function(given: Any) -> Any:
        arrived = []
        for sender, receiver in itertools.pairwise([*devices, devices[0]]):
            with tf.device(sender):
                sent = [given + float(number) for number in range(messages)]
            with tf.device(receiver):
                arrived.append(tf.add_n(sent))
        with tf.device(host_device()):
            return tf.add_n(arrived)

    return function


def _sends(sender: str, receiver: str, messages: int) -> Callable[[Any], Any]:
    """One device computes; so many of its last results are sent to the other one."""

    def function(given: Any) -> Any:
        results = []
        with tf.device(sender):
            value = factor = tf.fill((_WIDTH, _WIDTH), given / _WIDTH)
            for _ in range(_SENDS[1]):
                for _ in range(_PRODUCTS):
                    value = tf.matmul(value, factor)
                results.append(value[0, 0])
        with tf.device(receiver):
            return tf.add_n([result + 1.0 for result in results[-messages:]])

    return function


def _tasks(device: str, tasks: int) -> Callable[[Any], Any]:
    """One device runs so many tasks that take next to no time, each behind the one before, as an order has it."""

    def function(given: Any) -> Any:
        with tf.device(device):
            value = given
            for _ in range(tasks):
                with tf.control_dependencies([value]):
                    done = tf.no_op()
                with tf.control_dependencies([done]):
                    value = tf.sin(given) + tf.cos(given)
            return value

    return function
