"""A progress bar on the standard error, where that is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tf_ooo.planning.pictures.style import time_text


class Bar:
    """Shows which schedule is being made, and how far its own search is.

    Args:
        total: how many schedules there are to compare.
    """

    def __init__(self, total: int) -> None:
        console = Console(file=sys.stderr)
        count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            count,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._policies = self._progress.add_task("schedules", total=total, completed=-1)
        self._search = self._progress.add_task("search", total=1, visible=False)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._progress.stop()

    def policy(self, name: str) -> None:
        """The next schedule is begun."""
        self._progress.update(self._policies, advance=1, description=f"{name:<20}")
        self._progress.update(self._search, visible=False)

    def search(self, done: int, of: int, best_s: float) -> None:
        """A search has tried ``done`` of ``of`` schedules."""
        text = f"  best {time_text(best_s):<13}"
        self._progress.update(self._search, completed=done, total=of, visible=True, description=text)
