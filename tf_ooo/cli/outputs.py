"""Writes what the commands print: tables, JSON, pictures."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tf_ooo.planning.choosing.plan import step_s
from tf_ooo.planning.pictures.page import Page, page_html, write_page
from tf_ooo.planning.pictures.style import steady_step_s
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.units import bytes_text, count_text, time_text

FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, dir_okay=False, exists=True)


def picture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --html, --png, --trace and --json, which :class:`Outputs` holds."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
        click.option("--trace", type=FILE, help="Write a Chrome trace (ui.perfetto.dev opens it)."),
        click.option("--png", type=FILE, help="Write a picture; .svg and .pdf work too."),
        click.option("--html", type=FILE, help="Write a page with the timeline and the memory."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Outputs:
    """Says what a command prints and writes."""

    as_json: bool
    html: Path | None
    png: Path | None
    trace: Path | None

    def show(
        self,
        timeline: Timeline,
        *,
        page: Callable[[], Page],
        layers: Mapping[int, str],
        table: Table | None = None,
        texts: Sequence[tuple[Path | None, Callable[[], str]]] = (),
        notes: Sequence[str] = (),
        **facts: Any,
    ) -> None:
        """Write pictures and ``texts``, print the rest.  ClickException: a file cannot be written.

        Args:
            timeline: the timeline to show.
            page: what --html writes.
            layers: their names by number, for --trace.
            table, notes: printed with it; --json prints the timeline's figures and the ``facts`` instead.
            texts: files, and functions that return their text.
        """
        saves: list[tuple[Path | None, Callable[[Path], object]]] = [
            (self.html, lambda path: write_page(path, page_html(page()))),
            (self.png, timeline.save_png),
            (self.trace, functools.partial(timeline.save_trace, layers=layers)),
            *((path, functools.partial(_write_text, text)) for path, text in texts),
        ]
        files: list[str] = []
        for path, write in saves:
            if path is not None:
                try:
                    write(path)
                except OSError as error:
                    why_not = error.strerror or error
                    raise click.ClickException(f"{path} cannot be written: {why_not}") from error
                files.append(str(path))
        if self.as_json:
            content = {**timeline_facts(timeline), **facts, "files": files}
            click.echo(json.dumps(content, indent=1, allow_nan=False))
            return
        console = Console(soft_wrap=True)
        if table is not None:
            console.print(table)
        for note in notes:
            console.print(f"note: {note}", highlight=False, markup=False)
        for file in files:
            console.print(f"wrote {file}", highlight=False)


def _write_text(make: Callable[[], str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make(), encoding="utf-8")


def timeline_table(timeline: Timeline) -> Table:
    """Return the figures of one simulation."""
    table = Table(show_header=False, box=None)
    schedule = timeline.schedule
    peaks = timeline.peak_bytes
    rows = [
        ("schedule", f"{schedule.policy}, {schedule.mode}"),
        ("tasks", f"{timeline.start_s.size:,} in {count_text(timeline.steps, 'step')}"),
        ("makespan", time_text(timeline.makespan_s)),
        ("steady step", time_text(steady_step_s(timeline))),
        ("bubble", f"{timeline.bubble_fraction:.2%}"),
        ("peak memory", f"{bytes_text(max(peaks))} on device {peaks.index(max(peaks))}" if peaks else "-"),
        ("sent", bytes_text(timeline.message_bytes)),
    ]
    for what, value in rows:
        table.add_row(what, value)
    return table


def timeline_facts(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of one simulation as JSON types."""
    of_schedule = ("policy", "mode", "devices", "workers", "microbatches")
    return {
        **{name: getattr(timeline.schedule, name) for name in of_schedule},
        "steps": timeline.steps,
        "tasks": int(timeline.start_s.size),
        "step_s": step_s(timeline),
        "makespan_s": timeline.makespan_s,
        "steady_step_s": steady_step_s(timeline),
        "bubble_fraction": timeline.bubble_fraction,
        "peak_bytes": timeline.peak_bytes,
        "message_bytes": timeline.message_bytes,
    }
