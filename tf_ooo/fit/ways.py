"""What a controller asks about the ways in which its step is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any


def _nothing(*_: object) -> None:
    """The report has all there is to say."""


@dataclass(frozen=True)
class Ways:
    """What a controller asks where a step can be rewritten in several ways; the defaults are for one way.

    Attributes:
        run_stock: runs the stock step; given what has been decided, too.
        ran: a rewritten step has run, or it has been decided, for what: fills in the report.
        failed: the ways that cannot run, and why.
        left_out: one of them does not run any more, and why.
        give_up: there is none left.
        keeps: one of them is kept: the report is to be that one's.
        why_stock: the reason for which stock is kept, with what is to be added, given the steps left.
        decided: there is no comparison any more.
        shows_ops: whether the profiler sees the graph's ops in the step that is kept.
    """

    run_stock: Callable[[Callable[[], Any], str | None], Any] = lambda step, choice: step()
    ran: Callable[[str | None], None] = _nothing
    failed: Callable[[], Iterable[tuple[str, BaseException]]] = tuple
    left_out: Callable[[str, BaseException], None] = _nothing
    give_up: Callable[[], None] = _nothing
    keeps: Callable[[str], None] = _nothing
    why_stock: Callable[[str, Collection[str]], str] = lambda reason, left: reason
    decided: Callable[[], None] = _nothing
    shows_ops: bool = True
