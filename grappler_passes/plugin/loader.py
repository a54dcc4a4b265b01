"""Loads the C shim into TensorFlow, once per process."""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from grappler_passes.compat import releases, runtime
from grappler_passes.plugin import callback, requests

EXIT_WAIT_S = 5.0
"""The end of the interpreter waits so long for rewrites under way on other threads."""

_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
)


class PluginError(Exception):
    """The graph optimizer cannot be loaded; training then runs as if tf_ooo were not there."""


class _Shim:
    """Holds a loaded shim, which lives as long as the process: TensorFlow cannot unload an optimizer."""

    def __init__(self, path: Path, device_type: str) -> None:
        self.path = path
        self.device_type = device_type
        self.library = _declare(ctypes.CDLL(str(path)))
        self.callback = _CALLBACK(self._on_graph)
        self.library.ooo_set_callback(self.callback)

    def _on_graph(self, data: int, length: int, result: Any, result_length: Any) -> int:
        try:
            new = callback.answer(ctypes.string_at(data, length), self.device_type)
            if new is None:
                return 0
            buffer = self.library.ooo_alloc(len(new))
            if not buffer:
                return 0
            ctypes.memmove(buffer, new, len(new))
            result[0], result_length[0] = buffer, len(new)
            return 1
        except BaseException:  # Ctrl-C, or memory ran out, between the lines above
            return 0


_lock = threading.RLock()
_shims: dict[str, _Shim] = {}


def load() -> None:
    """Load the CPU shim, and the GPU shim if TensorFlow sees a GPU; install the trace-time hook.

    Does nothing the second time.  Raises :class:`PluginError` before anything is loaded.
    """
    with _lock:
        missing = [device for device in _device_types() if device not in _shims]
        paths = {device: shim_path(device) for device in missing}
        if missing:
            _check_conflicts()
        for device, path in paths.items():
            shim = _Shim(path, device)
            runtime.load_library(str(path))
            _shims[device] = shim
        requests.install()
        requests.connect(_enable_shims)


def loaded() -> tuple[str, ...]:
    """Return the device types whose shim is loaded: ``("CPU",)``, ``("CPU", "GPU")`` or nothing."""
    return tuple(_shims)


def python_calls() -> int:
    """Count how often TensorFlow's calls in this process got as far as Python."""
    return sum(shim.library.ooo_python_calls() for shim in _shims.values())


def shim_path(device_type: str) -> Path:
    """Return the path of the compiled shim for ``"CPU"`` or ``"GPU"``."""
    folder, module = Path(__file__).parent, f"_shim_{device_type.lower()}"
    for suffix in reversed(importlib.machinery.EXTENSION_SUFFIXES):  # the plain .so first
        path = folder / f"{module}{suffix}"
        if path.exists():
            return path.resolve()
    raise PluginError(
        f"the graph optimizer for {device_type} is not compiled ({folder} has no {module}); "
        "install a C compiler, then reinstall with: pip install ."
    )


def _device_types() -> list[str]:
    if (reason := releases.why_unsupported()) is not None:
        raise PluginError(reason)
    return ["CPU", "GPU"] if runtime.has_gpu() else ["CPU"]


def _check_conflicts() -> None:
    """Refuse to load beside another optimizer: two for one device type abort the process."""
    ours = {shim.path for shim in _shims.values()}
    optimizers = [path for path in _mapped_libraries() if path not in ours and _is_optimizer(path)]
    if optimizers:
        names = ", ".join(map(str, optimizers))
        raise PluginError(
            f"another graph optimizer is loaded already ({names}) and TensorFlow takes one per device type; "
            "remove it from tensorflow-plugins or TF_PLUGGABLE_DEVICE_LIBRARY_PATH. Nothing was loaded"
        )


def _mapped_libraries() -> list[Path]:
    """Return the shared libraries in this process; if the system does not tell, TensorFlow's plug-ins."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return [p for entry in sys.path for p in (Path(entry) / "tensorflow-plugins").glob("*.dylib")]
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    names = {f[5] for f in fields if len(f) == 6 and ".so" in f[5] and f[5].startswith("/")}
    return sorted(Path(name) for name in names)


def _is_optimizer(path: Path) -> bool:
    """Return whether a library in this process exports the entry point of a graph optimizer."""
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # mapped as data, or deleted since
        return False
    return hasattr(library, "TF_InitGraph")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.ooo_set_callback.argtypes = [_CALLBACK]
    library.ooo_set_callback.restype = None
    library.ooo_set_enabled.argtypes = [ctypes.c_int]
    library.ooo_set_enabled.restype = None
    library.ooo_alloc.argtypes = [ctypes.c_size_t]
    library.ooo_alloc.restype = ctypes.c_void_p
    library.ooo_python_calls.argtypes = []
    library.ooo_python_calls.restype = ctypes.c_ulong
    return library


def _enable_shims(value: bool) -> None:
    for shim in _shims.values():
        shim.library.ooo_set_enabled(int(value))


def _leave() -> None:
    """Let no call start and wait for those under way: TensorFlow's threads outlive the interpreter."""
    _enable_shims(False)
    deadline_s = time.monotonic() + EXIT_WAIT_S
    while any(s.library.ooo_running() for s in _shims.values()) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _reset_in_child() -> None:
    """Forget locks and calls in a forked child: neither their threads nor the calls exist there."""
    global _lock
    _lock = threading.RLock()
    for shim in _shims.values():
        shim.library.ooo_forget_running()


releases.say_at_import()
atexit.register(_leave)
os.register_at_fork(after_in_child=_reset_in_child)
