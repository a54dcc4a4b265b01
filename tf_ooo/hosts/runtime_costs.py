"""Measures TensorFlow's own costs of tasks, messages and steps on the devices of several processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from grappler_passes.compat import runtime
from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import CostError
from tf_ooo.hosts.devices import host_device
from tf_ooo.hosts.speeds import link_between, measure_device_link, seconds_of

# Two numbers of the same, so that what all calls take is taken off.
_MESSAGES, _TASKS = (2, 10), (32, 160)
_REPEATS, _MICROBATCHES = 7, 4
# A device computes about a millisecond for each message: those before it are through then.
_WIDTH, _PRODUCTS = 256, 2


def measured_link(devices: Sequence[str], hosts: Sequence[str]) -> Link:
    """Return the measured link between devices of different hosts, and nearer ones where there are any.

    These join processes of one host, and devices of one process; of each kind two devices are measured: the
    first one that has such a partner, and its last one.  CostError: a device does not answer.
    """
    processes = [name.rsplit("/device:", 1)[0] for name in devices]
    numbers, pairs = range(len(devices)), dict[int, tuple[str, str]]()
    for one, other in itertools.combinations(numbers, 2):
        tiers = sum(where[one] != where[other] for where in (processes, hosts))
        # The last one of the first device's partners counts.
        if tiers not in pairs or pairs[tiers][0] == devices[one]:
            pairs[tiers] = devices[one], devices[other]
    *nearer, farthest = sorted(pairs)
    ends = pairs[farthest]
    # Messages between processes alone count in a step of these.
    one_each = [devices[processes.index(process)] for process in dict.fromkeys(processes)]
    far = with_runtime(measure_device_link(*ends), one_each if farthest else devices, ends)
    near: Link | None = None
    groups: tuple[int, ...] = ()
    for tiers in nearer:
        where = hosts if tiers else processes
        near = replace(_nearer(far, *pairs[tiers], of_process=not tiers), near=near, groups=groups)
        groups = tuple(map(list(where).index, where))
    return replace(far, near=near, groups=groups)


def _nearer(far: Link, one: str, other: str, of_process: bool) -> Link:
    """Return the link between two near devices; between processes both ends spend as long on a message."""
    if of_process:
        return link_between((one, other))
    near = measure_device_link(one, other)
    latency_s = max(0.0, near.latency_s - far.send_s - far.receive_s)
    return replace(near, latency_s=latency_s, send_s=far.send_s, receive_s=far.receive_s)


def with_runtime(link: Link, devices: Sequence[str], ends: tuple[str, str] | None = None) -> Link:
    """Return the link with the runtime's measured costs on these devices.

    Time that both ends spend on a message is not latency.  ``ends``: the two that send messages; None: the
    first and the last.  CostError: a device does not answer.
    """
    first, last = ends or (devices[0], devices[-1])
    try:
        with runtime.calls_not_optimized():
            send_s = _each_s(partial(_sends, first, last), _MESSAGES)
            receive_s = _each_s(partial(_receives, first, last), _MESSAGES)
            task_s = _each_s(partial(_tasks, last), _TASKS)
            empty_s = _least_s([_called(_step(devices))])[0]
    except (tf.errors.OpError, ValueError) as error:
        raise CostError(f"runtime on {', '.join(devices)}: cannot be measured: {error}") from error
    ends_s = send_s + receive_s
    latency_s = max(0.0, link.latency_s - ends_s)
    # The first micro-batch passes all devices there and back, and the others follow.
    passes_s = 2 * (len(devices) - 1) * (latency_s + ends_s) + (_MICROBATCHES - 1) * ends_s
    step_s = max(0.0, empty_s - passes_s)
    return replace(
        link, latency_s=latency_s, send_s=send_s, receive_s=receive_s, task_s=task_s, step_s=step_s
    )


def _each_s(make: Callable[[int], Callable[..., Any]], counts: tuple[int, int]) -> float:
    """Return the seconds that one more item takes, not below 0."""
    few_s, many_s = _least_s([_called(make(count)) for count in counts])
    return max(0.0, many_s - few_s) / (counts[1] - counts[0])


def _least_s(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the shortest seconds of each call: other work on the machine only makes calls longer."""
    turns = [[seconds_of(call) for call in calls] for _ in range(_REPEATS)]
    return [min(seconds) for seconds in zip(*turns, strict=True)]


def _called(body: Callable[..., Any]) -> Callable[[], Any]:
    """Return a call that has been traced; its argument was not known in the trace."""
    given = tf.constant(1.0)
    concrete = tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec((), tf.float32))
    concrete(given).numpy()
    return lambda: concrete(given)


def _step(devices: Sequence[str]) -> Callable[[Any], Any]:
    """Return a pipeline's step that computes nothing: a few micro-batches pass all devices there and back."""

    def function(given: Any) -> Any:
        results = []
        for number in range(_MICROBATCHES):
            with tf.device(host_device()):
                value = given + float(number)
            for device in (*devices, *reversed(devices[:-1])):
                with tf.device(device):
                    value = value + 1.0
            results.append(value)
        with tf.device(devices[0]):
            return tf.add_n(results)

    return function


def _computed(given: Any, message: Any = None) -> Any:
    """Return the result of a millisecond of computing, which begins once the message is there."""
    with tf.control_dependencies([] if message is None else [message]):
        product = factor = tf.fill((_WIDTH, _WIDTH), given / _WIDTH)
    for _ in range(_PRODUCTS):
        product = tf.matmul(product, factor)
    return product[0, 0]


def _sends(sender: str, receiver: str, messages: int) -> Callable[[Any], Any]:
    """Return a function that computes equally often for any number of messages, and sends so many."""

    def function(given: Any) -> Any:
        with tf.device(sender):
            results = [_computed(given)]
            for _ in range(_MESSAGES[1] - 1):
                results.append(_computed(results[-1]))
        with tf.device(receiver):
            return tf.add_n([result + 1.0 for result in results[-messages:]])

    return function


def _receives(sender: str, receiver: str, messages: int) -> Callable[[Any], Any]:
    """Return a function that computes equally often for any number of messages, all sent at the beginning."""

    def function(given: Any) -> Any:
        with tf.device(sender):
            sent = [given + float(number) for number in range(messages)]
        with tf.device(receiver):
            value = given
            for number in range(_MESSAGES[1]):
                value = _computed(value, sent[number] + 1.0 if number < messages else None)
            return value

    return function


def _tasks(device: str, tasks: int) -> Callable[[Any], Any]:
    """Return a function in which one device runs so many very short tasks, each after the one before."""

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
