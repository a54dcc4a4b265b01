"""Defines the parts of a page, whoever fills it: a fit's report, ``tf-ooo plan``, a timeline by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.units import bytes_text, time_text

_MOST_ROWS = 60


@dataclass(frozen=True)
class Chart:
    """A drawn timeline.

    Attributes:
        html: the drawing.
        names: of the timelines that are drawn, empty where it is one; ``facts`` their numbers.
        notes: what is left out.
        numbers: what the letters and numbers in the boxes say.
    """

    html: str
    names: list[str]
    facts: list[tuple[str, list[str]]]
    notes: list[str]
    numbers: str


@dataclass(frozen=True)
class Bar:
    """A length to compare: ``percent`` of the longest, ``text`` its value; ``ours`` stands out."""

    name: str
    text: str
    percent: float
    ours: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of texts; the last cell of a row that is short takes the columns that are left.

    Attributes:
        title, header: without a header the first column is one.
        rows: at least one cell each.
        numbers: columns that are numbers, from 0.
        marked: the row that stands out; None: none.
        more: what is left out.
        wide: it takes the whole width of the page.
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
    """Sentences under a title; ``more``: what is left out."""

    title: str
    texts: Sequence[str]
    more: str = ""


@dataclass(frozen=True)
class Page:
    """All of a page, from top to bottom; what is empty is left out.

    Attributes:
        title, headline: what it is of, and what was gained.
        mood: of the headline, ``good``, ``plain`` or ``back``.
        bars, bars_title: steps beside each other.
        chart, drawn: the picture, and what it shows.
        lanes: instead of a chart, where no times are known: pictures of orders, of ``lane_kinds``.
        sections: below, in two columns where there is room; what has no rows or texts is left out.
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
    """Return one for each name, as percent of the longest."""
    longest_s = max(seconds.values(), default=0.0) or 1.0
    return [
        Bar(name, time_text(value_s), 100 * value_s / longest_s, name == ours)
        for name, value_s in seconds.items()
    ]


def layer_table(layers: Sequence[LayerCosts], places: Sequence[str], unit: str) -> Table:
    """Seconds of each layer for one ``unit``, and its bytes; ``places``: where each is, empty: nowhere."""
    where = bool(places)
    header = ["layer", *(["stage, device"] if where else [])]
    header += ["F", "dO", "dW", "U", "weights"]
    rows = []
    for number, layer in enumerate(layers[:_MOST_ROWS]):
        times_s = (layer.forward_s, layer.output_grad_s, layer.weight_grad_s, layer.update_s)
        name = layer.name or str(number)
        there = [places[number]] if where else []
        rows.append([name, *there, *map(time_text, times_s), bytes_text(layer.weight_bytes)])
    left_out = len(layers) - len(rows)
    more = f"and {left_out} more layers" if left_out > 0 else ""
    numbers = range(1 + where, len(header))
    return Table(f"Layers: time for one {unit}, bytes of weights", header, rows, numbers, more=more)
