"""This process' share of its host's memory: what the system lets it have, and models in it where it has GPUs.

Control groups of version 1 and 2 say how much that is.  Where the files of Linux are missing, nothing is
limited and nothing is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappler_passes.compat import runtime
from tf_ooo.compat import keras_layers, keras_variables, train_function
from tf_ooo.errors import BackendError
from tf_ooo.hosts.devices import host_device

if TYPE_CHECKING:
    import keras

_PROC = Path("/proc")
# Names of a group's files, by version of control groups.
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
# Counts of "memory.stat": pages of files not read lately, of those that were, and of mapped ones.
_FILE_PAGES = {
    1: ("total_inactive_file", "total_active_file", "total_mapped_file"),
    2: ("inactive_file", "active_file", "file_mapped"),
}
# Smaller variables are not looked at one by one; so much is left for everything else.
_LARGE_BYTES, _LEFT_BYTES = 1 << 20, 32 << 20


@dataclass(frozen=True)
class MemoryGroup:
    """A control group that may have less than its machine has.

    Attributes:
        limit_bytes: that its processes may have together; the system ends who passes it.
        used_bytes: that they have, without pages of files that the system would drop.
        name: another one for any other group, also of other machines.
        path: as ``/proc/self/cgroup`` names it.
    """

    limit_bytes: int
    used_bytes: int
    name: str
    path: str


@dataclass(frozen=True)
class ReportedLimit:
    """Bytes that a device may have, or this process may still take; ``said``: who says so, in words."""

    bytes: int
    said: str


def memory_group(proc: Path = _PROC) -> MemoryGroup | None:
    """The group with the lowest limit that this process is in; None: the whole machine is there for it."""
    located = _located(proc)
    if located is None:
        return None
    version, mount, path = located
    machine_bytes = _kilobytes(proc / "meminfo", "MemTotal")
    groups = [
        (limit_bytes, folder)
        for folder in (path, *path.parents)  # limits of all that can be seen hold
        if folder.is_relative_to(mount)
        for limit_bytes in [_number(folder / _LIMIT[version])]
        if limit_bytes is not None and (machine_bytes is None or limit_bytes < machine_bytes)
    ]
    if not groups:
        return None
    limit_bytes, folder = min(groups, key=lambda group: group[0])
    # A folder's number is the same wherever it is mounted, also in containers.
    name = f"{''.join(_lines(proc / 'sys/kernel/random/boot_id'))}/{os.stat(folder).st_ino}"
    within = f"/{folder.relative_to(mount).as_posix()}".removesuffix("/.") or "/"
    return MemoryGroup(limit_bytes, _used_bytes(folder, version), name, within)


def taken_bytes(proc: Path = _PROC) -> int:
    """Return the bytes that this process has in memory, its mapped files included; 0: not known."""
    return _kilobytes(proc / "self/status", "VmRSS") or 0


def available_bytes(proc: Path = _PROC) -> ReportedLimit | None:
    """Return the bytes that this process may still take: of the machine, or of its group where that is less.

    None where the system does not say.  What it may move to its swap space counts.
    """
    free, swap = (_kilobytes(proc / "meminfo", what) for what in ("MemAvailable", "SwapFree"))
    rows = [] if free is None else [ReportedLimit(free + (swap or 0), "free on this machine")]
    if group := memory_group(proc):
        said = f"left of the {group.limit_bytes} of this process' control group {group.path}"
        rows.append(ReportedLimit(max(0, group.limit_bytes - group.used_bytes), said))
    return min(rows, key=lambda row: row.bytes, default=None)


def limits_of_gpus(devices: Sequence[str]) -> dict[str, ReportedLimit]:
    """Return the bytes that TensorFlow may use of the GPUs among these devices, by full name.

    For a CPU it makes a number up.
    """
    gpus = [name for name in devices if ":GPU:" in name]
    sizes = runtime.device_memory_bytes() if gpus else {}
    said = "TensorFlow may use so many of {}"
    return {gpu: ReportedLimit(sizes[gpu], said.format(gpu)) for gpu in gpus if sizes.get(gpu, 0) > 0}


def _located(proc: Path) -> tuple[int, Path, Path] | None:
    """Version, mount point and folder of this process' memory group; None: there is none."""
    lines = [line.split(":", 2) for line in _lines(proc / "self/cgroup")]
    mounts = list(_mounts(_lines(proc / "self/mountinfo")))
    for version, kind, controller in ((1, "cgroup", "memory"), (2, "cgroup2", "")):
        paths = [path for _, names, path in lines if controller in names.split(",")]
        served = [
            (root, point)
            for root, point, file_system, options in mounts
            if file_system == kind and (not controller or controller in options.split(","))
        ]
        if paths and served:
            root, point = served[0]
            return version, point, point / _within(paths[0], root)
    return None


def _mounts(lines: Sequence[str]) -> Iterator[tuple[str, Path, str, str]]:
    """Yield for each line of ``mountinfo`` what is mounted, where, its type and options."""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 2:
            yield _plain(fields[3]), Path(_plain(fields[4])), kind[0], kind[2]


def _plain(text: str) -> str:
    """Spaces and the like are written as ``\\040`` there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _within(path: str, root: str) -> str:
    """Return the part of a group's path below what is mounted; a container may see its own group only."""
    root = root.rstrip("/")
    if ".." in path.split("/") or not f"{path}/".startswith(f"{root}/"):
        return ""
    return path.removeprefix(root).lstrip("/")


def _used_bytes(folder: Path, version: int) -> int:
    """Return the used bytes that cannot be dropped: active pages of files are dropped too, unless mapped."""
    used = _number(folder / _USED[version]) or 0
    counts = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    inactive, active, mapped = (int(counts.get(name, 0)) for name in _FILE_PAGES[version])
    return max(0, used - max(inactive, inactive + active - mapped))


def _kilobytes(file: Path, what: str) -> int | None:
    """Return bytes of a line ``what:  123 kB``."""
    for line in _lines(file):
        name, _, value = line.partition(":")
        if name == what:
            return 1024 * int(value.split()[0])
    return None


def _number(file: Path) -> int | None:
    """Return None also for "max", no limit."""
    text = "".join(_lines(file))
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


@contextmanager
def host_memory() -> Iterator[None]:
    """A model that gets its weights inside has them, and later its optimizer's state, in this host's memory.

    >>> with tf_ooo.host_memory():
    ...     model = build()
    >>> model.compile("adam", "mse")
    >>> model.fit(x, y, callbacks=[tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=4))])

    For models that no device holds: a pipeline never runs a step of such a model on one device, not even to
    measure it (``first_steps="cut"``).

    Raises:
        BackendError: a weight, and what is left of this process' memory: Linux would end the process.
    """
    import tensorflow as tf

    there_bytes = 0

    def create(next_creator: Callable[..., Any], **arguments: Any) -> Any:
        nonlocal there_bytes
        with tf.device(device):
            variable = next_creator(**arguments)
        own_bytes = int(variable.shape.num_elements() or 0) * int(variable.dtype.size)  # 0: its shape is open
        _check_room(variable.name, own_bytes, there_bytes)
        there_bytes += own_bytes
        keras_variables.mark_in_host_memory(variable)
        return variable

    device = host_device()
    with tf.device(device), tf.variable_creator_scope(create):
        yield


def _check_room(name: str, own_bytes: int, there_bytes: int) -> None:
    """BackendError: there is no room for another variable as large; its first value is made beside it."""
    available = available_bytes() if own_bytes >= _LARGE_BYTES else None
    if available is not None and available.bytes <= own_bytes + _LEFT_BYTES:
        raise BackendError(
            f"tf_ooo.host_memory(): {there_bytes} bytes of weights are there, and {own_bytes} more for "
            f"{name.removesuffix(':0')!r} are too many: {available.bytes} bytes are {available.said}; build "
            "the model on a machine, or in a group, with more memory"
        )


def in_host_memory(model: keras.Model) -> bool:
    """Return whether the model was built in :func:`host_memory`."""
    values = map(keras_variables.value_of, model.weights)
    return any(keras_variables.is_in_host_memory(value) for value in values if value is not None)


def evaluate_in_host_memory(model: keras.Model) -> None:
    """From now on ``evaluate`` and ``predict`` of a model run on this host's CPU, where its weights are.

    TensorFlow would send all of them to the first GPU at once, at each batch.
    """
    for kind in ("test", "predict"):
        name = f"make_{kind}_function"
        make = getattr(model, name)
        if not hasattr(make, "on_host"):
            keras_layers.set_on(model, name, _making_there(model, f"{kind}_function", make))


def _making_there(model: keras.Model, kept_as: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' ``make_test_function`` or ``make_predict_function``, whose function runs on the CPU."""

    def make_there(*args: Any, **kwargs: Any) -> Any:
        made_by_keras = make(*args, **kwargs)
        function = train_function.functions_of(model)[kept_as]
        if not hasattr(function, "on_host"):
            function = _on_host(function)
            train_function.set_functions_of(model, {kept_as: function})
        return made_by_keras and function  # Keras 2 takes what is returned

    make_there.on_host = make  # type: ignore[attr-defined]
    return make_there


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    import tensorflow as tf

    def call(given: object) -> Any:
        with tf.device(host_device()):
            return function(given)

    call.on_host = function  # type: ignore[attr-defined]
    return call
