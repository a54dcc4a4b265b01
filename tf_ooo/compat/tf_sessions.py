"""Sessions of TensorFlow 1, by which this process asks one worker."""

from __future__ import annotations

from typing import Any


def abandon(session: Any) -> None:
    """Has the session never closed: that asks its worker, and a lost one is waited for."""
    session._closed = True
