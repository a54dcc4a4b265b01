"""Writes seconds, bytes, names and ops as a reader wants to see them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grappler_passes.graph.training_graph import LayerTask, TrainingGraph

_MOST = 5
# An op is named by the last so many parts: most ops' names share those before.
_LAST = 2
# Python shows a name in a message like this.
_QUOTED = re.compile(r"'([^']+)'")
# Kinds of tasks and ops, as one says them.
KIND_WORDS = {
    "F": "forward pass",
    "dO": "output gradient",
    "dW": "weight gradient",
    "U": "update",
    "comm": "gradient exchange",
}


@dataclass(frozen=True)
class Unit:
    """Describes a unit in which numbers are shown: ``value / size`` and its name."""

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
    """Return ``12.3 ms``; a dash for None."""
    if seconds is None:
        return "-"
    unit = time_unit(seconds)
    return f"{seconds / unit.size:.4g} {unit.name}"


def seconds_text(seconds: float | None) -> str:
    """Return the time with two decimals: ``12.34 ms``, ``1.20 s``; a dash for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def about_text(seconds: float) -> str:
    """Return the time with about two digits: ``25 s``, ``0.9 s``, ``1.1 ms``."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def about_count(count: float) -> str:
    """Return the number with about two digits: ``27,000`` for 27,158."""
    return f"{float(f'{count:.2g}'):,.0f}"


def count_text(number: int, what: str) -> str:
    """Return ``1 device``, ``1,000 micro-batches``."""
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural if number != 1 else ''}"


def bytes_text(count: float | None) -> str:
    """Return ``1.23 GB``; a dash for None."""
    if count is None:
        return "-"
    unit = bytes_unit(count)
    return f"{count / unit.size:.4g} {unit.name}" if unit.size > 1 else f"{count:.0f} bytes"


def with_units(text: str) -> str:
    """Return the sentence with its numbers of bytes written as :func:`bytes_text` does."""
    return re.sub(r"\b(\d{4,}) bytes( \([\d.]+ [MGT]B\))?", lambda match: bytes_text(int(match[1])), text)


def sizes_text(sizes: Mapping[str, float]) -> str:
    """Return ``stash 12.3 MB, ema 1.2 MB``."""
    return ", ".join(f"{what} {bytes_text(size)}" for what, size in sizes.items())


@dataclass(frozen=True)
class Places:
    """Names places of ops, such as ``weight gradient of conv2d``; ops of no layer by their name's end."""

    of: Mapping[str, str]

    @classmethod
    def of_tasks(cls, graph: TrainingGraph, by_task: Mapping[LayerTask, Sequence[str]]) -> Places:
        """Make the places of a classified step whose ops are known by task."""
        return cls(
            {
                name: f"{KIND_WORDS[kind]} of {graph.layers[layer].name}"
                for (kind, layer), names in by_task.items()
                for name in names
            }
        )

    def listed(self, names: Iterable[str]) -> str:
        """Return the first few places, each once."""
        return first_of(list(dict.fromkeys(map(self._of, names))))

    def told(self, text: str, names: Iterable[str] = ()) -> str:
        """Return a message with places instead of op names; ``names``: the ops that it is about."""
        about = [name for name in names if repr(name) not in text]
        text = _QUOTED.sub(lambda match: self._of(match[1]) if "/" in match[1] else match[0], text)
        return f"{text} ({self.listed(about)})" if about else text

    def _of(self, name: str) -> str:
        return self.of.get(name) or "/".join(name.split("/")[-_LAST:])


def first_of(names: Sequence[str], most: int = _MOST) -> str:
    """Return ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
