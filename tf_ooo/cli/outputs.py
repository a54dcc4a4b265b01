"""What the commands write: tables, JSON, pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tf_ooo.planning.choosing.plan import Candidate
from tf_ooo.planning.choosing.trial import step_s
from tf_ooo.planning.pictures.style import bytes_text, steady_step_s, time_text
from tf_ooo.planning.simulation.timeline import Timeline

_FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True)
class Outputs:
    """What a command is asked to print and to write; see :func:`picture_options`.

    Attributes:
        as_json, grid: what to print.
        html, png, trace, out, costs_out: files for pictures, the schedule and the costs; None: none.
    """

    as_json: bool
    grid: bool
    html: Path | None
    png: Path | None
    trace: Path | None
    out: Path | None = None
    costs_out: Path | None = None


def picture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --html, --png, --trace, --grid and --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
        click.option("--grid", is_flag=True, help="Print the schedule as a grid of tasks over time."),
        click.option("--trace", type=_FILE, help="Write a Chrome trace (ui.perfetto.dev opens it)."),
        click.option("--png", type=_FILE, help="Write a picture; .svg and .pdf work too."),
        click.option("--html", type=_FILE, help="Write a page with the timeline and the memory."),
    ):
        command = option(command)
    return command


def write_pictures(timeline: Timeline, html: Path | None, png: Path | None, trace: Path | None) -> list[Path]:
    """Writes the files that are asked for; returns them.  ClickException where one cannot be written."""
    wanted = [(html, timeline.save_html), (png, timeline.save_png), (trace, timeline.save_trace)]
    written = []
    for path, save in wanted:
        if path is not None:
            _or_refuse(path, partial(save, path))
            written.append(path)
    return written


def write_text(path: Path, text: str) -> Path:
    """Writes a file; ClickException where that is not possible."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    _or_refuse(path, write)
    return path


def _or_refuse(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}") from error


def print_json(content: dict[str, Any]) -> None:
    """Prints JSON on the standard output."""
    click.echo(json.dumps(content, indent=1, allow_nan=False))


def print_files(console: Console, files: Sequence[Path]) -> None:
    """Says which files were written."""
    for path in files:
        console.print(f"wrote {path}", highlight=False)


def print_grid(console: Console, timeline: Timeline) -> None:
    """The grid, in colours where the terminal shows them."""
    from tf_ooo.planning.pictures.grid import coloured

    console.print(coloured(timeline, console.width))


def candidates_table(compared: Sequence[Candidate], chosen: str) -> Table:
    """What was compared: the fastest first, with the reason why others cannot be taken."""
    table = Table("schedule", title="Predicted, the fastest first", title_justify="left")
    for column in ("step", "makespan", "bubble", "peak memory"):
        table.add_column(column, justify="right")
    table.add_column("remark")
    for candidate in compared:
        mine = candidate.name == chosen
        remark = "chosen" if mine else _readable(candidate.reason)
        table.add_row(candidate.name, *_row(candidate), remark, style="bold" if mine else "")
    return table


def _readable(reason: str) -> str:
    return re.sub(r"\b(\d{4,}) bytes", lambda match: bytes_text(int(match[1])), reason)


def _row(candidate: Candidate) -> tuple[str, str, str, str]:
    trial = candidate.trial
    if trial is None:
        return "-", "-", "-", "-"
    step, makespan = time_text(candidate.step_s), time_text(trial.makespan_s)
    return step, makespan, f"{trial.timeline.bubble_fraction:.1%}", bytes_text(trial.peak_bytes)


def timeline_table(timeline: Timeline) -> Table:
    """The figures of one simulation."""
    table = Table(show_header=False, box=None)
    schedule = timeline.schedule
    peaks = timeline.peak_bytes
    rows = [
        ("schedule", f"{schedule.policy}, {schedule.mode}"),
        ("tasks", f"{timeline.start_s.size:,} in {timeline.steps} step{'s' if timeline.steps > 1 else ''}"),
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
    """The figures of one simulation as JSON types."""
    return {
        "policy": timeline.schedule.policy,
        "mode": timeline.schedule.mode,
        "devices": timeline.schedule.devices,
        "workers": timeline.schedule.workers,
        "microbatches": timeline.schedule.microbatches,
        "steps": timeline.steps,
        "tasks": int(timeline.start_s.size),
        "step_s": step_s(timeline),
        "makespan_s": timeline.makespan_s,
        "steady_step_s": steady_step_s(timeline),
        "bubble_fraction": timeline.bubble_fraction,
        "peak_bytes": timeline.peak_bytes,
        "message_bytes": timeline.message_bytes,
    }


def candidate_facts(candidate: Candidate) -> dict[str, Any]:
    """One candidate as JSON types; null where there is no schedule."""
    trial = candidate.trial
    known = trial is not None and math.isfinite(candidate.step_s)
    return {
        "schedule": candidate.name,
        "step_s": candidate.step_s if known else None,
        "makespan_s": trial.makespan_s if trial and known else None,
        "bubble_fraction": trial.timeline.bubble_fraction if trial else None,
        "peak_bytes": trial.timeline.peak_bytes if trial else None,
        "reason": candidate.reason,
    }
