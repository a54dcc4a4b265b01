"""A timeline as one HTML page that needs no other file and no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_ooo.errors import BackendError
from tf_ooo.planning.pictures.bars import view_of
from tf_ooo.planning.pictures.style import bytes_text, steady_step_s, time_text

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline

# A browser draws 12,000 bars in 5 s, 37,000 in 20 s (Chromium without a GPU, two cores);
# above the limit the page shows a part and says which.
MOST_TASKS, MOST_LANES = 16_000, 96
_SETTINGS = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}


def save_html(timeline: Timeline, path: str | os.PathLike[str], measured: Timeline | None = None) -> None:
    """Writes the page, ``measured`` beside it.  BackendError: plotly or jinja2 is not installed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(timeline, measured), encoding="utf-8")


def render(timeline: Timeline, measured: Timeline | None = None) -> str:
    """The page's HTML."""
    try:
        import jinja2

        from tf_ooo.planning.pictures.figure import Run, figure
    except ImportError as error:
        raise BackendError(f"pages need plotly and jinja2: pip install plotly jinja2 ({error})") from error
    pairs = [(timeline, "predicted"), (measured, "measured")]
    given = [(each, name) for each, name in pairs if each is not None]
    most = MOST_TASKS // len(given), MOST_LANES // len(given)
    runs = [Run(each, view_of(each, *most), name if len(given) > 1 else "") for each, name in given]
    chart = figure(runs).to_html(full_html=False, include_plotlyjs=True, config=_SETTINGS)
    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True
    )
    return environment.get_template("timeline.html").render(
        title=title(timeline),
        names=[run.name for run in runs],
        facts=_facts([run.timeline for run in runs]),
        notes=[f"{run.name} {run.view.note}".strip() for run in runs if run.view.note],
        chart=chart,
    )


def title(timeline: Timeline) -> str:
    """What ran, in one line."""
    schedule = timeline.schedule
    parts = list(dict.fromkeys([schedule.policy, schedule.mode.replace("_", " ")]))
    if schedule.devices > 1 or schedule.workers == 1:
        parts.append(_count(schedule.devices, "device"))
    if schedule.workers > 1:
        parts.append(_count(schedule.workers, "worker"))
    if schedule.microbatches > 1:
        parts.append(_count(schedule.microbatches, "micro-batch"))
    if timeline.steps > 1:
        parts.append(_count(timeline.steps, "step"))
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural if number != 1 else ''}"


def _facts(timelines: list[Timeline]) -> list[tuple[str, list[str]]]:
    rows: list[tuple[str, Any]] = [
        ("policy", lambda t: t.schedule.policy),
        ("mode", lambda t: t.schedule.mode),
        ("makespan", lambda t: time_text(t.makespan_s)),
        ("steady step", lambda t: time_text(steady_step_s(t))),
        ("bubble", lambda t: f"{t.bubble_fraction:.2%}"),
        ("peak memory", _peak),
        ("tasks", lambda t: f"{t.start_s.size:,}"),
    ]
    return [(name, [value(timeline) for timeline in timelines]) for name, value in rows]


def _peak(timeline: Timeline) -> str:
    if not timeline.peak_bytes:
        return "not known"
    peak = max(timeline.peak_bytes)
    return f"{bytes_text(peak)} on device {timeline.peak_bytes.index(peak)}"
