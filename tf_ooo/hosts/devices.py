"""``devices=``: from a count, names or a cluster to full names of devices that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grappler_passes.compat import runtime
from tf_ooo.errors import BackendError
from tf_ooo.hosts.addresses import has_devices


def available_devices() -> tuple[str, ...]:
    """Return full names of all devices that ops can be placed on."""
    return tuple(sorted(runtime.runtime_devices()))


def home_device() -> str:
    """Return where TensorFlow puts ops that ask for no device: this process' first GPU, or CPU."""
    import tensorflow as tf

    with tf.init_scope():
        return str(tf.constant(0.0).device)


def host_device() -> str:
    """Return the CPU of this process, by its full name, which lists lack once a cluster has been joined."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/device:CPU:0"):
        return str(tf.constant(0.0).device)


def full_names(value: Any, local_rank: int = 0) -> tuple[str, ...]:
    """Return the devices of a pipeline, in its order.

    ``value``: an int (the first so many GPUs, or CPUs where there are no GPUs; None: all of these), names of
    logical or physical devices, or an object with ``devices``.  For the process ``local_rank`` of those that
    share their machine's GPUs an int means the GPUs behind those of the processes before it.
    BackendError: one does not exist, or stands there twice; says which there are.
    """
    import tensorflow as tf

    if value is None or isinstance(value, int):
        return _first(value, local_rank, tf)
    names = value.devices if has_devices(value) else value
    there = available_devices()
    chosen = [_full_name(str(getattr(name, "name", name)), there, tf) for name in names]
    if twice := [name for name in chosen if chosen.count(name) > 1]:
        raise BackendError(f"devices: {twice[0]} is named twice; a device runs one part of the pipeline")
    return tuple(chosen)


def _first(count: int | None, local_rank: int, tf: Any) -> tuple[str, ...]:
    own = (f"{_local_job()}/", "/device:")  # as they are listed once a cluster has been joined
    names: list[str] = []
    for kind in ("GPU", "CPU"):
        names = [d.name for d in tf.config.list_logical_devices(kind) if d.name.startswith(own)]
        if names:
            break
    first = 0 if count is None or kind == "CPU" else local_rank * count
    if count is not None and first + count > len(names):
        before = f" behind the {first} of other processes" if first else ""
        raise BackendError(
            f"devices={count}{before}: there are {len(names)} ({', '.join(names) or 'none'}); CPU "
            "devices are made, before the first op, by tf.config.set_logical_device_configuration(tf.config."
            f"list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * {count})"
        )
    return tuple(_full_name(name, available_devices(), tf) for name in names[first:][:count])


def _full_name(text: str, there: Sequence[str], tf: Any) -> str:
    text = text.rsplit(":physical_device:", 1)[-1]
    try:
        wanted = tf.DeviceSpec.from_string(text if text.startswith("/") else f"/device:{text.split('/')[-1]}")
    except ValueError as error:
        raise BackendError(f"devices: {text!r} is no device name: {error}") from error
    asked = (wanted.job, wanted.replica, wanted.task, (wanted.device_type or "").upper(), wanted.device_index)
    matches = []
    for name in there:
        has = tf.DeviceSpec.from_string(name)
        have = (has.job, has.replica, has.task, has.device_type, has.device_index)
        if all(a in (None, "") or a == b for a, b in zip(asked, have, strict=True)):
            matches.append(name)
    if len(matches) > 1:
        matches = [name for name in matches if name.startswith(_local_job())] or matches
    if len(matches) != 1:
        raise BackendError(f"devices: there is no {text!r}; there are {', '.join(there)}")
    return matches[0]


def _local_job() -> str:
    return host_device().rsplit("/device:", 1)[0]
