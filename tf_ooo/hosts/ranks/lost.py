"""Raises the right error for a communication whose other end is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine


@contextlib.contextmanager
def naming_the_lost(engine: Engine, where: str) -> Iterator[None]:
    """Raises a BackendError for an error that says that this rank's partner is gone; others go through."""
    try:
        yield
    except Exception as error:
        if not engine.is_lost(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if engine.is_lost(RuntimeError(line))]
        said = max(lines, key=len)[:300] if lines else type(error).__name__
        who = engine.who_ended()
        ended = f"ended: {who}" if who else "ended or cannot be reached"
        raise BackendError(
            f"rank {engine.rank} of {engine.size} stopped {where}: another worker {ended}."
            " Restart all workers; with BackupAndRestore or ModelCheckpoint training continues from the last "
            f"file. ({said})"
        ) from error
