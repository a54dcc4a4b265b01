"""Computes with spans of time: (begin, end) in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tf_ooo.compat.tf_profiler import TracedEvent

Span = tuple[float, float]


def span_of(event: TracedEvent) -> Span:
    """Return begin and end of an event of TensorFlow's profiler."""
    return event.begin_s, event.begin_s + event.duration_s


def busy_spans(spans: Iterable[Span]) -> list[Span]:
    """Return when at least one of them ran, in order and apart from each other."""
    busy: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if busy and begin_s <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(end_s, busy[-1][1]))
        else:
            busy.append((begin_s, end_s))
    return busy


def length_s(spans: Iterable[Span]) -> float:
    """Return seconds of all together."""
    return sum(end_s - begin_s for begin_s, end_s in spans)
