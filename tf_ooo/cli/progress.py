"""A progress bar on the standard error, where that is a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tf_ooo.planning.pictures.style import time_text


class Bar:
    """Shows, inside ``progress``, which of ``total`` schedules is made, and how far its own search is."""

    def __init__(self, total: int) -> None:
        console = Console(file=sys.stderr)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._policies = self.progress.add_task("schedules", total=total, completed=-1)
        self._search = self.progress.add_task("search", total=1, visible=False)

    def policy(self, name: str) -> None:
        """The next schedule is begun."""
        self.progress.update(self._policies, advance=1, description=f"{name:<20}")
        self.progress.update(self._search, visible=False)

    def search(self, done: int, of: int, best_s: float) -> None:
        """A search has tried ``done`` of ``of`` schedules."""
        text = f"  best {time_text(best_s):<13}"
        self.progress.update(self._search, completed=done, total=of, visible=True, description=text)
