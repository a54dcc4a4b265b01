"""Makes pages: one of a timeline alone, and the parts that all other pages have. No network is needed."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.pictures import style
from tf_ooo.planning.pictures.style import numbers_text, steady_step_s, view_of
from tf_ooo.units import bytes_text, count_text, time_text

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline


_MOST_ROWS = 60


@dataclass(frozen=True)
class Chart:
    """Holds a drawn timeline.

    Attributes:
        html: the drawing.
        names: the names of the drawn timelines, empty for a single one; ``facts``: their numbers.
        notes: say what is left out.
        numbers: explains the letters and numbers in the boxes.
    """

    html: str
    names: list[str]
    facts: list[tuple[str, list[str]]]
    notes: list[str]
    numbers: str


@dataclass(frozen=True)
class Bar:
    """Describes a bar to compare: ``percent`` of the longest, ``text`` its value; ``ours`` stands out."""

    name: str
    text: str
    percent: float
    ours: bool = False


@dataclass(frozen=True)
class Table:
    """Holds rows of texts; the last cell of a short row spans the remaining columns.

    Attributes:
        title, header: without a header the first column is one.
        rows: at least one cell each.
        numbers: columns that are numbers, from 0.
        marked: the row that stands out; None: none.
        more: says what is left out.
        wide: whether it takes the whole width of the page.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[int] = ()
    marked: int | None = None
    more: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Listed:
    """Holds sentences under a title; ``more`` says what is left out."""

    title: str
    texts: Sequence[str]
    more: str = ""


@dataclass(frozen=True)
class Page:
    """Holds all of a page, from top to bottom; empty parts are left out.

    Attributes:
        title, headline: the page's subject, and the gain.
        mood: the headline's mood, ``good``, ``plain`` or ``back``.
        bars, bars_title: bars that compare steps, and their title.
        chart, drawn: the picture, and a sentence that says what it shows.
        lanes: instead of a chart, where no times are known: pictures of orders, of ``lane_kinds``.
        sections: below, in two columns if there is room; sections without rows or texts are left out.
    """

    title: str
    headline: str = ""
    mood: str = "plain"
    bars: Sequence[Bar] = ()
    bars_title: str = "Step times"
    chart: Chart | None = None
    drawn: str = ""
    lanes: Sequence[Mapping[str, Any]] = ()
    lane_kinds: Sequence[str] = ()
    sections: Sequence[Table | Listed] = ()


def bars_of(seconds: Mapping[str, float], ours: str) -> list[Bar]:
    """Return a bar for each name, in percent of the longest."""
    longest_s = max(seconds.values(), default=0.0) or 1.0
    return [
        Bar(name, time_text(value_s), 100 * value_s / longest_s, name == ours)
        for name, value_s in seconds.items()
    ]


def layer_table(layers: Sequence[LayerCosts], places: Sequence[str], unit: str) -> Table:
    """Return seconds of each layer for one ``unit``, and its bytes; ``places``: where each is, or empty."""
    where = ["stage, device"] if places else []
    header = ["layer", *where, "F", "dO", "dW", "U", "weights"]
    rows = []
    for number, layer in enumerate(layers[:_MOST_ROWS]):
        times_s = (layer.forward_s, layer.output_grad_s, layer.weight_grad_s, layer.update_s)
        there = [layer.name or str(number), *places[number : number + 1]]
        rows.append([*there, *map(time_text, times_s), bytes_text(layer.weight_bytes)])
    more = f"and {len(layers) - len(rows)} more layers" if len(layers) > len(rows) else ""
    numbers = range(1 + len(where), len(header))
    return Table(f"Layers: time for one {unit}, bytes of weights", header, rows, numbers, more=more)


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


def write_page(path: str | os.PathLike[str], html: str) -> Path:
    """Write a page, and beside it, once for all pages in a folder, the script that draws charts."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")
    script = target.parent / PLOTLY
    if f'src="{PLOTLY}"' in html and not script.exists():
        from plotly.offline import get_plotlyjs

        script.write_text(get_plotlyjs(), encoding="utf-8")
    return target


def render(timeline: Timeline, measured: Timeline | None = None) -> str:
    """Return the HTML of a timeline's page."""
    return page_html(Page(title(timeline), chart=chart_of(timeline, measured)))


def page_html(page: Page) -> str:
    """Return a page's HTML."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    looks = {"colours": style.COLOURS, "text_colours": style.TEXT_COLOURS, "kind_names": style.NAMES}
    return environment.get_template("page.html").render(page=page, plotly=PLOTLY, **looks)


def chart_of(
    timeline: Timeline,
    measured: Timeline | None = None,
    layers: Mapping[int, str] | None = None,
    limits_bytes: Sequence[float] = (),
) -> Chart:
    """Return the chart of a timeline; with a ``measured`` step, that is drawn below one planned step.

    Args:
        timeline: as planned.
        measured: the measured timeline of one step.
        layers: names by number.
        limits_bytes: the limit of each device's memory, or one for all; empty: there is none.
    """
    from tf_ooo.planning.pictures.figure import Run, figure

    names = layers or {}
    if measured is None:
        runs = [Run(timeline, view_of(timeline, MOST_TASKS, MOST_LANES), "", names)]
    else:
        most = MOST_TASKS // 2, MOST_LANES // 2
        pairs = ((timeline.one_step(), "planned"), (measured, "measured"))
        runs = [Run(each, view_of(each, *most), name, names) for each, name in pairs]
    drawn = figure(runs, limits_bytes)
    return Chart(
        drawn.to_html(full_html=False, include_plotlyjs=False, config=_SETTINGS),
        [run.name for run in runs],
        _facts(timeline) if measured is None else _facts_beside(timeline, runs[0].timeline, measured),
        [f"{run.name} {run.view.note}".strip() for run in runs if run.view.note],
        numbers_text(runs[0].timeline.schedule),
    )


def title(timeline: Timeline) -> str:
    """Say in one line what ran."""
    schedule, steps = timeline.schedule, timeline.steps
    parts = list(dict.fromkeys([schedule.policy, schedule.mode.replace("_", " ")]))
    if schedule.devices > 1 or schedule.workers == 1:
        parts.append(count_text(schedule.devices, "device"))
    counts = {"worker": schedule.workers, "micro-batch": schedule.microbatches, "step": steps}
    return ", ".join([*parts, *(count_text(count, what) for what, count in counts.items() if count > 1)])


def _facts(timeline: Timeline) -> list[tuple[str, list[str]]]:
    """Return facts on the whole timeline, and on one step where steps repeat."""
    schedule = timeline.schedule
    unit = "micro-batch" if schedule.asynchronous else "step"
    count = schedule.microbatches if schedule.asynchronous else timeline.steps
    drawn = f"the {count_text(count, unit)} shown" if count > 1 else f"the {unit} shown"
    rows = [
        (f"a {unit}, once they repeat", time_text(steady_step_s(timeline))),
        (f"{drawn}, from first to last task", time_text(timeline.makespan_s)),
    ]
    if timeline.steps > 1 or schedule.asynchronous:
        # While the first of several steps begin and the last end, more devices wait than once they repeat.
        steady = timeline.steady_bubble_fraction
        rows.append((f"devices idle in a {unit}, once they repeat", f"{steady:.2%}"))
    rows += [
        ("devices idle meanwhile", f"{timeline.bubble_fraction:.2%}"),
        ("peak memory", _peak(timeline)),
        ("tasks", f"{timeline.start_s.size:,}"),
    ]
    return [(name, [value]) for name, value in rows]


def _facts_beside(whole: Timeline, planned: Timeline, measured: Timeline) -> list[tuple[str, list[str]]]:
    """Return facts on a planned and a measured step; the peak is of the ``whole`` plan."""
    unit = "round" if whole.schedule.asynchronous else "step"
    took = [time_text(each.makespan_s) for each in (planned, measured)]
    idle = [f"{whole.steady_bubble_fraction:.1%}", f"{measured.bubble_fraction:.1%}"]
    facts = [(f"one {unit}, from first to last task", took), ("devices idle", idle)]
    if whole.peak_bytes:
        facts.append(("peak memory", [_peak(whole), "not measured"]))
    return facts


def _peak(timeline: Timeline) -> str:
    if not timeline.peak_bytes:
        return "not known"
    peak = max(timeline.peak_bytes)
    return f"{bytes_text(peak)} on device {timeline.peak_bytes.index(peak)}"
