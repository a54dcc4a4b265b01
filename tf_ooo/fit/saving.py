"""Saving in a training that may be cut off: a file gives way when the new one is whole.

Keras empties the file before it reads the weights.  Where this process is killed meanwhile, or weights are on
a worker that is, the checkpoint that is left would be gone with them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
from collections.abc import Callable
from typing import Any

# Keras' formats of one file.
_FILES = (".keras", ".h5")


def replacing(save: Callable[..., Any]) -> Callable[..., Any]:
    """``Model.save`` or ``save_weights``, that writes beside a file which is there, then replaces it."""

    @functools.wraps(save)
    def call(*args: Any, **kwargs: Any) -> Any:
        path = _present_file(args[0] if args else kwargs.get("filepath"))
        overwrites = kwargs.get("overwrite", args[1] if len(args) > 1 else True)
        if path is None or not overwrites or "save_format" in kwargs:
            return save(*args, **kwargs)
        folder, name = os.path.split(path)
        # Processes of several machines may save to one folder.
        beside = os.path.join(folder, f".{socket.gethostname()}.{os.getpid()}.{name}")
        try:
            returned = save(beside, *args[1:], **{k: v for k, v in kwargs.items() if k != "filepath"})
            shutil.copymode(path, beside)
            os.replace(beside, path)
        finally:
            with contextlib.suppress(OSError):
                os.remove(beside)
        return returned

    return call


def _present_file(filepath: Any) -> str | None:
    """The file behind a path, or a link; None where there is none, or it is no whole file of Keras'."""
    if not isinstance(filepath, (str, os.PathLike)):
        return None
    path = os.fspath(filepath)
    if not isinstance(path, str) or not path.endswith(_FILES) or not os.path.isfile(path):
        return None
    return os.path.realpath(path)
