"""Reads ``devices=``: a count, names, or a cluster ``host1:port,host2:port``; says which can be reached.

Nothing here imports TensorFlow before it is asked for devices that exist.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from grappler_passes.compat import runtime
from tf_ooo.errors import BackendError, OptionsError

CLUSTER_VARIABLE = "TF_OOO_CLUSTER"
"""This variable replaces ``devices=`` where that is left out; ``tf-ooo run`` sets it."""

START_VARIABLE, START_S = "TF_OOO_START_TIMEOUT_S", 45.0
"""Processes wait so many seconds for those that have not come yet."""

_WAYS_OUT = {
    errno.EADDRINUSE: "another process has that port (ss -ltnp names it): end it, or take another port, in "
    "the lists of all tasks",
    errno.EACCES: "ports below 1024 need root: take another port, in the lists of all tasks",
}
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_DEVICE = re.compile(r"(CPU|GPU|TPU|XLA_CPU|XLA_GPU):\d+", re.IGNORECASE)
_PARTS = re.compile(r"(?:/?(?:device:)?)(CPU|GPU|TPU):(\d+)", re.IGNORECASE)
_FULL = re.compile(r"/job:[^/]+/(?:replica:\d+/)?task:\d+/(?:device:)?(?:CPU|GPU|TPU):\d+", re.IGNORECASE)

_ACCEPTED = "an int, a list of device names such as ['CPU:0', 'CPU:1'], or a cluster, 'host1:port,host2:port'"


def is_cluster(text: object) -> bool:
    """Return whether ``devices=`` lists addresses, ``"host1:2222,host2:2222"``, not ``"CPU:0,CPU:1"``."""
    return isinstance(text, str) and all(
        _ADDRESS.fullmatch(part) and not _DEVICE.fullmatch(part) for part in map(str.strip, text.split(","))
    )


def parse(text: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses, in the order of the tasks. OptionsError: one is malformed or given twice."""
    addresses = tuple(map(str.strip, text.split(",") if isinstance(text, str) else text))
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 65536:
            raise OptionsError(f"cluster: {address!r} is no address; expected host:port, such as node1:2222")
        if addresses.count(address) > 1:
            raise OptionsError(f"cluster: {address} is given twice; each task needs an address of its own")
    return addresses


def cluster_of_environment() -> str | None:
    """Return the addresses in TF_OOO_CLUSTER; None: it is not set. OptionsError: it holds something else."""
    text = os.environ.get(CLUSTER_VARIABLE)
    try:
        return ",".join(parse(text)) if text else None
    except OptionsError as error:
        raise OptionsError(f"{CLUSTER_VARIABLE}={text!r:.80}: {error}") from error


def host_port(address: str) -> tuple[str, int]:
    """Split an address: ``"[::1]:2222"`` gives ``("::1", 2222)``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def can_listen(address: str) -> str:
    """Say why this machine cannot listen at that address, and what to do; empty if it can."""
    try:
        _bound(*host_port(address)).close()
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0, "is it another machine's address?")
        return f"{error.strerror or error}; {way_out}"
    return ""


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen, so that another one can ask for the same port."""
    family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(socket.socket(family, kind, proto))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(where)
        stack.pop_all()
        return holder


def answers(address: str, timeout_s: float = 5.0) -> str:
    """Say why nobody accepts connections at that address; empty if someone does."""
    try:
        with socket.create_connection(host_port(address), timeout=timeout_s):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def outward_host(addresses: Sequence[str]) -> str:
    """Return the name under which the machines at these addresses can reach this one."""
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection(host_port(address), timeout=5.0) as other:
            host: str = other.getsockname()[0]
            return f"[{host}]" if ":" in host else host
    return "localhost"


@contextlib.contextmanager
def held_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Reserve different TCP ports of an address of this machine, within the block.

    A server that is told the number can listen there, as TensorFlow's do (with ``SO_REUSEADDR``).
    """
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_bound(host, 0)) for _ in range(count)]
        yield [holder.getsockname()[1] for holder in holders]


def free_port() -> int:
    """Return a TCP port that nobody listens at now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different TCP ports that nobody listens at now."""
    with held_ports(count, "0.0.0.0") as ports:
        return ports


def has_devices(value: object) -> bool:
    """Return whether ``devices=`` is an object that has devices, such as a joined cluster."""
    return hasattr(value, "devices") and not isinstance(value, Sequence)


def check_devices(value: object) -> None:
    """Raise OptionsError unless ``value`` can be ``devices=``; only TensorFlow tells whether they exist."""
    refused = f"devices={value!r:.80} is not accepted"
    if isinstance(value, bool) or (isinstance(value, int) and value < 1):
        raise OptionsError(f"{refused}; accepted: an int of at least 1, or names")
    if isinstance(value, int) or value is None or has_devices(value):
        return
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if any(map(_PARTS.fullmatch, parts)):
            raise OptionsError(f"{refused}; write a list, {parts}")
        try:
            parse(value)
        except OptionsError as error:
            raise OptionsError(f"{refused}; accepted: {_ACCEPTED} ({error})") from error
        return
    if isinstance(value, bytes) or not isinstance(value, Sequence) or not value:
        raise OptionsError(f"{refused}; accepted: {_ACCEPTED}")
    for name in value:
        text = str(getattr(name, "name", name))
        if not (_PARTS.fullmatch(text) or _FULL.fullmatch(text)) and ":physical_device:" not in text:
            raise OptionsError(f"devices: {text!r} is no device name; write 'CPU:0', 'GPU:1' or a full name")


def over_hosts(value: object) -> bool:
    """Return whether ``devices=`` are those of a cluster: its addresses, or an object that has devices."""
    return is_cluster(value) or has_devices(value)


# Decides at which addresses the servers that TensorFlow starts can be reached. They have no password: anyone
# who can open the port can run anything there that TensorFlow can.


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches ``host:port``; true if the name is not known."""
    try:
        return ipaddress.ip_address(_ip(address)).is_loopback
    except OSError:
        return True


def _ip(address: str) -> str:
    host, port = host_port(address)
    ip = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    return str(ip).partition("%")[0]


@contextlib.contextmanager
def only_at(address: str) -> Iterator[None]:
    """Restrict a server of this ``host:port`` that TensorFlow starts in the block to that address.

    TensorFlow itself opens the port at all addresses of the machine.  BackendError: it did so all the same,
    or this system cannot prevent it.
    """
    from tf_ooo.hosts.native import load  # ctypes: most processes start no server

    library, ip = load("_listening"), _ip(address)
    if library.ooo_listen_only(ip.encode(), host_port(address)[1]) <= 0:
        raise BackendError(
            f"cannot listen at {address} alone: TensorFlow opens ports in another way than it did"
        )
    try:
        yield
        if not library.ooo_narrowed():
            raise BackendError(
                f"{address} was opened at all addresses of this machine, and whoever reaches the port can "
                "run anything: end this process"
            )
    finally:
        library.ooo_listen_only(b"::", 0)


def available_devices() -> tuple[str, ...]:
    """Return full names of all devices that ops can be placed on."""
    return tuple(sorted(runtime.runtime_devices()))


def home_device() -> str:
    """Return the device of ops that ask for none: this process' first GPU, or CPU."""
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

    ``value``: an int (the first so many GPUs, or CPUs if there are no GPUs; None: all of these), names of
    logical or physical devices, or an object with ``devices``.  If processes share a machine's GPUs, an int
    means for ``local_rank`` the GPUs after those of the processes before it. BackendError: a device does not
    exist, or is given twice; the message lists all.
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
