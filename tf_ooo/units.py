"""Seconds and bytes as a reader wants to see them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit that numbers are shown in: ``value / size`` and its name."""

    name: str
    size: float


_TIMES = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6))
# Decimal, as links and data sheets count.
_SIZES = (Unit("TB", 1e12), Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3), Unit("bytes", 1.0))


def time_unit(seconds: float) -> Unit:
    """Return the unit in which a time is easy to read."""
    return next((unit for unit in _TIMES if seconds >= unit.size), _TIMES[-1])


def bytes_unit(count: float) -> Unit:
    """Return the unit in which a number of bytes is easy to read."""
    return next((unit for unit in _SIZES if count >= unit.size), _SIZES[-1])


def time_text(seconds: float | None) -> str:
    """``12.3 ms``; a dash for None."""
    if seconds is None:
        return "-"
    unit = time_unit(seconds)
    return f"{seconds / unit.size:.4g} {unit.name}"


def seconds_text(seconds: float | None) -> str:
    """Two decimals: ``12.34 ms``, ``1.20 s``; a dash for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def about_text(seconds: float) -> str:
    """Two digits or so: ``25 s``, ``0.9 s``, ``1.1 ms``."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def about_count(count: float) -> str:
    """``27,000`` for 27,158: two digits or so."""
    return f"{float(f'{count:.2g}'):,.0f}"


def count_text(number: int, what: str) -> str:
    """``1 device``, ``1,000 micro-batches``."""
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural if number != 1 else ''}"


def bytes_text(count: float | None) -> str:
    """``1.23 GB``; a dash for None."""
    if count is None:
        return "-"
    unit = bytes_unit(count)
    return f"{count / unit.size:.4g} {unit.name}" if unit.size > 1 else f"{count:.0f} bytes"


def with_units(text: str) -> str:
    """Return numbers of bytes in a sentence as :func:`bytes_text` writes them."""
    return re.sub(r"\b(\d{4,}) bytes( \([\d.]+ [MGT]B\))?", lambda match: bytes_text(int(match[1])), text)


def sizes_text(sizes: Mapping[str, float]) -> str:
    """``stash 12.3 MB, ema 1.2 MB``."""
    return ", ".join(f"{what} {bytes_text(size)}" for what, size in sizes.items())
