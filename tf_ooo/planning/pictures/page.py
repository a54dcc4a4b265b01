"""Pages: a timeline by itself, and what every other page has of it.  No network is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_ooo.errors import BackendError
from tf_ooo.planning.pictures.bars import view_of
from tf_ooo.planning.pictures.style import bytes_text, numbers_text, steady_step_s, time_text

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline

# A browser draws 12,000 bars in 5 s, 37,000 in 20 s (Chromium without a GPU, two cores);
# above the limit the page shows a part and says which.
MOST_TASKS, MOST_LANES = 16_000, 96
# Beside the pages: it is four times as large as they may be together.
PLOTLY = "plotly.min.js"
_SETTINGS = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}


@dataclass(frozen=True)
class Chart:
    """A part of a page.

    Attributes:
        html: the drawing.
        names: of the timelines that are drawn, empty where it is one; ``facts`` their numbers.
        notes: what is left out.
        numbers: what the numbers in the boxes say.
    """

    html: str
    names: list[str]
    facts: list[tuple[str, list[str]]]
    notes: list[str]
    numbers: str


def save_html(timeline: Timeline, path: str | os.PathLike[str], measured: Timeline | None = None) -> None:
    """Writes the page, ``measured`` beside it.  BackendError: plotly or jinja2 is not installed."""
    write_page(path, render(timeline, measured))


def write_page(path: str | os.PathLike[str], html: str) -> Path:
    """Writes a page, and beside it, once for all pages of a folder, the script that draws charts."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")
    script = target.parent / PLOTLY
    if f'src="{PLOTLY}"' in html and not script.exists():
        from plotly.offline import get_plotlyjs

        script.write_text(get_plotlyjs(), encoding="utf-8")
    return target


def render(timeline: Timeline, measured: Timeline | None = None) -> str:
    """The page's HTML."""
    return filled("timeline.html", chart=chart_of(timeline, measured), title=title(timeline))


def filled(template: str, *folders: Path, **values: Any) -> str:
    """A template of these pages, or of ``folders``, with its values.

    Raises:
        BackendError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise BackendError(f"pages need jinja2: pip install jinja2 ({error})") from error
    loader = jinja2.FileSystemLoader([*folders, Path(__file__).parent / "templates"])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    return environment.get_template(template).render(plotly=PLOTLY, **values)


def chart_of(
    timeline: Timeline,
    measured: Timeline | None = None,
    layers: Mapping[int, str] | None = None,
    limit_bytes: float | None = None,
) -> Chart:
    """The chart of a timeline, ``measured`` under it; ``layers``: names by number.

    Raises:
        BackendError: plotly is not installed.
    """
    try:
        from tf_ooo.planning.pictures.figure import Run, figure
    except ImportError as error:
        raise BackendError(f"pages need plotly: pip install plotly ({error})") from error
    pairs = [(timeline, "predicted"), (measured, "measured")]
    given = [(each, name) for each, name in pairs if each is not None]
    most = MOST_TASKS // len(given), MOST_LANES // len(given)
    runs = [
        Run(each, view_of(each, *most), name if len(given) > 1 else "", layers or {}) for each, name in given
    ]
    return Chart(
        figure(runs, limit_bytes).to_html(full_html=False, include_plotlyjs=False, config=_SETTINGS),
        [run.name for run in runs],
        _facts([run.timeline for run in runs]),
        [f"{run.name} {run.view.note}".strip() for run in runs if run.view.note],
        numbers_text(timeline.schedule),
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
