"""Seconds and bytes as a reader wants to see them."""

from __future__ import annotations

from collections.abc import Mapping

from tf_ooo.planning.pictures.style import bytes_text


def seconds_text(seconds: float | None) -> str:
    """``12.34 ms``, ``1.20 s``, or ``-`` for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def device_text(name: str) -> str:
    """``CPU:0`` of a device of this process; of others ``worker 1, GPU:0``; other names stay."""
    parts = dict(part.partition(":")[::2] for part in name.strip("/").split("/"))
    if "device" not in parts:
        return name
    there = "" if parts.get("job", "localhost") == "localhost" else f"{parts['job']} {parts.get('task', 0)}, "
    return there + parts["device"]


def sizes_text(sizes: Mapping[str, float]) -> str:
    """``stash 12.3 MB, ema 1.2 MB``."""
    return ", ".join(f"{what} {bytes_text(size)}" for what, size in sizes.items())
