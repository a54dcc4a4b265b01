"""Saving in a training that may be cut off: what stands under a name is whole, the old or the new.

Keras writes under the final name, and empties a file before it reads the weights.  Where this process is
killed meanwhile, or weights are on a worker that is, what is left there is no checkpoint.  So all is written
beside, in the same folder, and takes its name when it is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tf_ooo.compat import keras_fits

# Keras' formats of one file; a SavedModel is a folder.
_FILES = (".keras", ".h5")


def replacing(save: Callable[..., Any]) -> Callable[..., Any]:
    """``Model.save``, ``save_weights`` or ``export``, that writes beside the path, then puts it there."""

    @functools.wraps(save)
    def call(*args: Any, **kwargs: Any) -> Any:
        exports = save.__name__ == "export"  # which never asks
        path = _own_path(args[0] if args else kwargs.get("filepath"), folder=exports)
        overwrites = exports or kwargs.get("overwrite", args[1] if len(args) > 1 else True)
        asks = path is not None and path.exists() and not overwrites
        if path is None or asks or "save_format" in kwargs:
            return save(*args, **kwargs)
        with written_beside(path) as beside:
            return save(str(beside), *args[1:], **{k: v for k, v in kwargs.items() if k != "filepath"})

    return call


def _own_path(filepath: object, folder: bool) -> Path | None:
    """Return the local file or folder behind a path, or a link; None where Keras has to see to it."""
    if not isinstance(filepath, (str, os.PathLike)):
        return None
    path = os.fspath(filepath)
    if not isinstance(path, str) or "://" in path or not (folder or path.endswith(_FILES)):
        return None
    real = Path(os.path.realpath(path))
    return None if (real.is_dir() and not folder) or not real.parent.is_dir() else real


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A path beside this one; what is there at the end of the block takes the place of ``path`` at once.

    Nothing is left beside if the block raises; what a killed process left goes with the next block.
    """
    # Processes of several machines may save to one folder.
    host = f".{socket.gethostname()}."
    for left in path.parent.glob(f"{glob.escape(host)}*.{glob.escape(path.name)}"):
        if not _runs(left.name[len(host) :].split(".", 1)[0]):
            _remove(left)
    beside = path.parent / f"{host}{os.getpid()}.{path.name}"
    try:
        yield beside
        if path.is_dir() and beside.is_dir():
            _keep_others(path, beside)
            _exchange(beside, path)
        else:
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
    finally:
        _remove(beside)


def _keep_others(old: Path, new: Path) -> None:
    """Keep in the new folder what somebody else has put into the old one."""
    for entry in old.iterdir():
        kept = new / entry.name
        if not kept.exists() and entry.is_dir():
            shutil.copytree(entry, kept, copy_function=_linked, symlinks=True)
        elif not kept.exists():
            _linked(str(entry), str(kept))


# Linux' renameat2 takes these: relative paths are the process' own; both names change at once.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> None:
    """Two folders change their names; at once where the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    if rename and rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    old = other.with_name(f"{one.name}.old")
    other.rename(old)
    one.rename(other)
    old.rename(one)


def _runs(pid: str) -> bool:
    """Return whether a process of that number runs here, as far as one can tell."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except OSError:  # it is another user's
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def saving_backups_whole(callback: Any) -> Callable[[], None] | None:
    """The ``_save_model`` of a ``BackupAndRestore``, whose weights and epoch change together; None: no such.

    Keras writes the one, then the other: killed in between, the fit that is resumed trains an epoch twice.
    """
    save = keras_fits.backup_save(callback)
    if save is None:
        return None

    def call() -> None:
        folder = _own_path(callback.backup_dir, folder=True)
        if folder is None:
            save()
            return
        with written_beside(folder) as beside:
            if folder.exists():
                shutil.copytree(folder, beside, copy_function=_linked_unless_json)
            with keras_fits.backing_up_into(callback, str(beside)):
                save()

    return call


def _linked_unless_json(source: str, target: str) -> None:
    """Weights are replaced, which leaves the other link alone; JSON is written into the file itself."""
    if source.endswith(".json"):
        shutil.copy2(source, target)
    else:
        _linked(source, target)


def _linked(source: str, target: str) -> None:
    """The same file under another name; a copy where that cannot be."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
