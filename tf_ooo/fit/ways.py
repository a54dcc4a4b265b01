"""What a controller asks about the ways in which its step is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol


class Ways(Protocol):
    """Several ways to rewrite a step, of which some may fail; :class:`OneWay` where there is one.

    Attributes:
        shows_ops: whether the profiler sees the graph's ops in the step that is kept.
    """

    @property
    def shows_ops(self) -> bool: ...

    def run_stock(self, step: Callable[[], Any], choice: str | None) -> Any:
        """Runs the stock step; ``choice`` is what has been decided."""

    def ran(self, choice: str | None) -> None:
        """A rewritten step has run, or it has been decided: fills in the report."""

    def failed(self) -> Iterable[tuple[str, BaseException]]:
        """The ways that cannot run, and why."""

    def left_out(self, which: str, error: BaseException) -> None:
        """One of them does not run any more."""

    def give_up(self) -> None:
        """There is none left."""

    def keeps(self, which: str) -> None:
        """One of them is kept: the report is to be that one's."""

    def why_stock(self, reason: str, left: Collection[str]) -> str:
        """The reason for which the stock step is kept, with what is to be added; ``left`` are the steps."""

    def decided(self) -> None:
        """There is no comparison any more."""


class OneWay:
    """See :class:`Ways`: the report has all there is to say."""

    shows_ops = True

    def run_stock(self, step: Callable[[], Any], choice: str | None) -> Any:
        """As it is."""
        return step()

    def ran(self, choice: str | None) -> None:
        """Nothing to do."""

    def failed(self) -> Iterable[tuple[str, BaseException]]:
        """A failure is the session's."""
        return ()

    def left_out(self, which: str, error: BaseException) -> None:
        """Nothing to do."""

    def give_up(self) -> None:
        """Nothing to do."""

    def keeps(self, which: str) -> None:
        """Nothing to do."""

    def why_stock(self, reason: str, left: Collection[str]) -> str:
        """As it is."""
        return reason

    def decided(self) -> None:
        """Nothing to do."""
