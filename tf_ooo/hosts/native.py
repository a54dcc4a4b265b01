"""This room's small C libraries; setup.py compiles them."""

from __future__ import annotations

import ctypes
import importlib.machinery
from functools import cache
from pathlib import Path

from tf_ooo.errors import BackendError


@cache
def load(name: str) -> ctypes.CDLL:
    """Return the library; BackendError: it is not compiled."""
    for suffix in reversed(importlib.machinery.EXTENSION_SUFFIXES):  # the plain .so first
        path = Path(__file__).with_name(f"{name}{suffix}")
        if path.exists():
            return ctypes.CDLL(str(path))
    raise BackendError(
        f"{name}, which several hosts need, is not compiled; install a C compiler, then reinstall with: "
        "pip install ."
    )
