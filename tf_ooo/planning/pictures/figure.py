"""Draws the plotly figure of a timeline: lanes, links and memory over one time axis."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from tf_ooo import units
from tf_ooo.planning.model.schedule import Lane, Schedule
from tf_ooo.planning.model.task import KIND_NUMBER, KINDS, Floats
from tf_ooo.planning.pictures import style
from tf_ooo.planning.pictures.style import Bars, View, bars_of, curve_points, links_of

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline

_BAR, _LINK_BAR = 0.84, 0.7
_ROW_PX, _LEAST_ROW_PX, _ALL_ROWS_PX, _LINK_PX = 34, 13, 580, 11
_MEMORY_PX, _GAP_PX, _TOP_PX, _BOTTOM_PX = 230, 34, 84, 50
_TOOLS_PX = 26  # plotly's own, above the legend
_MOST_NAMES = 5000  # of layers, in what is shown at a bar: they are most of a page
_MOST_LABELS, _MOST_LINKS_OPEN, _MOST_LINK_TICKS, _MOST_LEGEND = 800, 8, 24, 12
# If a memory limit is so many times the peak, no line is drawn.
_FAR_ABOVE, _LIMIT_COLOUR = 2.5, "#B00020"
# Links come first: plotly (4.1) forgets which labels are too small when another part with bars follows.
_LINKS, _LANES, _MEMORY = "y", "y2", "y3"


@dataclass(frozen=True)
class Run:
    """Represents a timeline to draw.

    Attributes:
        name: its name; empty if it is the only one.
        layers: names of layers by number, as far as they are known.
    """

    timeline: Timeline
    view: View
    name: str = ""
    layers: Mapping[int, str] = field(default_factory=dict)


def figure(runs: Sequence[Run], limits_bytes: Sequence[float] = ()) -> go.Figure:
    """Return lanes above, links below, memory at the bottom; lanes of two runs are drawn in pairs.

    ``limits_bytes``: each device's limit of memory, or one for all; each gets a line.
    """
    end_s = max(min(run.timeline.makespan_s, run.view.until_s) for run in runs)
    unit = units.time_unit(end_s)
    rows, chart = _Rows(runs), go.Figure()
    links = _add_links(chart, runs[0], unit)
    for place, run in enumerate(runs):
        _add_tasks(chart, run, rows, place, unit)
    for place, run in enumerate(runs):
        _add_memory(chart, run, place, unit, end_s)
    for limit_bytes in sorted(set(limits_bytes)):
        whose = [str(number) for number, limit in enumerate(limits_bytes) if limit == limit_bytes]
        numbers = f" of device{'s' if len(whose) > 1 else ''} {', '.join(whose)}"
        _add_limit(chart, runs[0], limit_bytes, numbers if len(whose) < len(limits_bytes) else "")
    _lay_out(chart, rows, links, unit, end_s / unit.size)
    return chart


class _Rows:
    """Says where each lane of each run is drawn: device after device, with a run's lanes together."""

    def __init__(self, runs: Sequence[Run]) -> None:
        drawn = {(lane, place) for place, run in enumerate(runs) for lane in run.view.lanes}
        keys = sorted(drawn, key=lambda key: (key[0][0], key[1], key[0][1]))
        self.place = {key: number for number, key in enumerate(keys)}
        whole = [_row_label(runs[place], lane) for lane, place in keys]
        # Streams side by side of one device, as measured: the first says it for all.
        self.labels = ["" if i and whole[i - 1] == label else label for i, label in enumerate(whole)]

    @property
    def height_px(self) -> int:
        count = len(self.labels)
        return count * max(min(_ROW_PX, _ALL_ROWS_PX // max(count, 1)), _LEAST_ROW_PX)


def _row_label(run: Run, lane: Lane) -> str:
    """Label a row; measured tasks that ran side by side have rows that are no streams."""
    label = style.lane_label(run.timeline.schedule, lane)
    device, role = label.split()[:2], label.split()[2:]
    if run.name == "measured" and role not in (["comm"], ["update"]):
        label = " ".join(device)
    return f"{label} {run.name}".rstrip()


def _add_tasks(chart: go.Figure, run: Run, rows: _Rows, place: int, unit: units.Unit) -> None:
    """Add one trace for each kind, however many tasks: plotly is fast with few traces."""
    bars = bars_of(run.timeline, run.view)
    row_of_lane = np.array([rows.place[lane, place] for lane in run.view.lanes])
    for kind in KINDS:
        some = bars.of_kind(KIND_NUMBER[kind])
        if not len(some):
            continue
        texts = style.labels_of(some, run.timeline.schedule) if len(bars) <= _MOST_LABELS else None
        layers = _layer_texts(some, run) if len(bars) <= _MOST_NAMES else None
        chart.add_bar(
            **_bar_columns(some.start_s, some.end_s, unit),
            y=row_of_lane[some.lane],
            yaxis=_LANES,
            width=_BAR,
            name=style.NAMES[kind],
            legendgroup=kind,
            legendrank=1000 + KIND_NUMBER[kind],
            showlegend=all(trace.legendgroup != kind for trace in chart.data),
            marker={
                "color": style.COLOURS[kind],
                "line": {"width": 0.5 if len(bars) < 4 * _MOST_LABELS else 0, "color": "white"},
                "pattern": {"shape": "/" if place else "", "fgcolor": "white", "size": 5, "solidity": 0.12},
            },
            text=texts,
            textposition="inside" if texts else "none",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": style.TEXT_COLOURS[kind], "size": 11},
            customdata=_hover_columns(some, run.timeline.schedule, unit),
            hovertext=layers,
            hovertemplate=_hover(kind, some, unit, run.name, named=layers is not None),
        )


def _bar_columns(start_s: Floats, end_s: Floats, unit: units.Unit) -> dict[str, Any]:
    return {"orientation": "h", "base": start_s / unit.size, "x": (end_s - start_s) / unit.size}


def _hover_columns(bars: Bars, schedule: Schedule, unit: units.Unit) -> Floats:
    """Return stage, first and last layer, micro-batch, part, step, start, end, length as compact numbers."""
    f = bars.fields
    ranges = [schedule.layers_of(stage) for stage in range(int(f.stage.max()) + 1)]
    first, last = (np.array([each[i] for each in ranges])[f.stage] for i in (0, -1))
    columns = (f.stage, first, last, f.microbatch, f.part, bars.step)
    times = (time_s / unit.size for time_s in (bars.start_s, bars.end_s, bars.end_s - bars.start_s))
    return np.stack([*columns, *times], axis=1).astype(np.float32)


def _layer_texts(bars: Bars, run: Run) -> list[str] | None:
    """Return for each bar the names of its stage's layers."""
    if not run.layers:
        return None
    schedule, stages = run.timeline.schedule, bars.fields.stage.tolist()
    what = style.what_a_stage_is(schedule)
    names = {stage: style.names_of_layers(schedule.layers_of(stage), run.layers) for stage in set(stages)}
    return [f"{what} {stage}: {html.escape(names[stage])}" for stage in stages]


def _hover(kind: str, bars: Bars, unit: units.Unit, run: str, named: bool) -> str:
    part, time = ".%{customdata[4]}" if bars.fields.part.any() else "", unit.name
    lines = [
        f"<b>{kind}:%{{customdata[0]}}{part}@%{{customdata[3]}}</b> {run}".rstrip(),
        "%{hovertext}" if named else "stage %{customdata[0]}, layers %{customdata[1]}–%{customdata[2]}",
        "micro-batch %{customdata[3]}, step %{customdata[5]}",
        f"%{{customdata[6]:.5~g}} – %{{customdata[7]:.5~g}} {time} (%{{customdata[8]:.4~g}} {time})",
    ]
    return "<br>".join(lines) + "<extra></extra>"


def _add_links(chart: go.Figure, run: Run, unit: units.Unit) -> list[str]:
    """Draw a thin row for each link, and return their names."""
    links, link, messages = links_of(run.timeline, run.view)
    if not (messages.end_s > messages.start_s).any():
        return []  # nothing is sent, or no link keeps it waiting
    size = units.bytes_unit(float(messages.size_bytes.max()))
    columns = (messages.source, messages.target, messages.size_bytes / size.size)
    times = (messages.start_s / unit.size, messages.end_s / unit.size)
    chart.add_bar(
        **_bar_columns(messages.start_s, messages.end_s, unit),
        y=link,
        yaxis=_LINKS,
        width=_LINK_BAR,
        name="message",
        legendrank=2000,
        marker={"color": style.MESSAGE_COLOUR, "line": {"width": 0}},
        customdata=np.stack([*columns, *times], axis=1).astype(np.float32),
        hovertemplate="<b>device %{customdata[0]} to %{customdata[1]}</b><br>"
        f"%{{customdata[2]:.4~g}} {size.name}<br>"
        f"%{{customdata[3]:.5~g}} – %{{customdata[4]:.5~g}} {unit.name}<extra></extra>",
    )
    return [f"{source} → {target}" for source, target in links]


def _add_memory(chart: go.Figure, run: Run, place: int, unit: units.Unit, end_s: float) -> None:
    """Add a line for each device: dark to light, or one colour each if there are few."""
    memory = run.timeline.memory
    size = units.bytes_unit(max(run.timeline.peak_bytes, default=0))
    devices = [device for device in run.view.devices if device < len(memory)]
    shades = sample_colorscale("viridis", [0.8 * i / max(len(devices) - 1, 1) for i in range(len(devices))])
    until_s = min(end_s, run.timeline.makespan_s)
    for device, colour in zip(devices, shades, strict=True):
        time_s, alive = curve_points(memory[device], run.view.until_s, until_s)
        chart.add_scatter(
            x=time_s / unit.size,
            y=(alive / size.size).astype(np.float32),
            yaxis=_MEMORY,
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": colour, "dash": "dot" if place else "solid"},
            name=f"device {device}",
            legend="legend2",
            legendgroup=f"memory {device}",
            showlegend=place == 0 and 1 < len(devices) <= _MOST_LEGEND,
            hovertemplate=f"<b>device {device}</b> {run.name}<br>"
            f"%{{y:.4~g}} {size.name} at %{{x:.5~g}} {unit.name}<extra></extra>",
        )
    if place == 0:
        many = f"<br>{devices[0]} dark, {devices[-1]} light" if len(devices) > _MOST_LEGEND else ""
        planned = "memory as planned" if run.name and devices else "memory"
        chart.update_layout({"yaxis3": {"title": {"text": f"{planned}, {size.name}{many}"}}})


def _add_limit(chart: go.Figure, run: Run, limit_bytes: float, whose: str) -> None:
    """Add a line; only its value if the line would be far above the curves."""
    peak_bytes = max(run.timeline.peak_bytes, default=0)
    size, text = units.bytes_unit(peak_bytes), f"limit{whose} {units.bytes_text(limit_bytes)}"
    if run.timeline.memory and limit_bytes > _FAR_ABOVE * peak_bytes:
        corner = {"x": 1, "xref": "paper", "xanchor": "right", "y": 1, "yref": "y3 domain", "yanchor": "top"}
        chart.add_annotation(
            text=f"{text}, above the picture ↑", showarrow=False, font={"color": _LIMIT_COLOUR}, **corner
        )
    elif run.timeline.memory:
        chart.add_hline(
            y=limit_bytes / size.size,
            yref=_MEMORY,
            line={"color": _LIMIT_COLOUR, "width": 1.5, "dash": "dash"},
            annotation={"text": text, "font": {"color": _LIMIT_COLOUR}},
        )


def _lay_out(chart: go.Figure, rows: _Rows, links: list[str], unit: units.Unit, end: float) -> None:
    shown = len(links) <= _MOST_LINKS_OPEN
    has_memory = any(trace.yaxis == _MEMORY for trace in chart.data)
    axis = {"fixedrange": True, "zeroline": False, "showgrid": False}
    chart.update_layout(
        barmode="overlay",
        template="plotly_white",
        hovermode="closest",
        dragmode="zoom",
        uniformtext={"mode": "hide", "minsize": 8},
        margin={"l": 10, "r": 20, "t": _TOP_PX, "b": _BOTTOM_PX},
        legend2={"orientation": "h", "x": 1, "xanchor": "right", "yanchor": "bottom"},
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top"},
        xaxis={"title": {"text": f"time, {unit.name}"}, "range": [0, end], "anchor": "free", "position": 0,
               "gridcolor": "#E5E5E5"},
        yaxis={**axis, **_link_ticks(links), "anchor": "x", "automargin": True},
        yaxis2={**axis, **_ticks(rows.labels), "anchor": "x", "automargin": True},
        yaxis3={**axis, "showgrid": True, "rangemode": "tozero", "anchor": "x", "visible": has_memory},
    )  # fmt: skip
    chart.update_layout(_heights(rows, links, shown, has_memory))
    if links:
        _add_fold_button(chart, rows, links, shown, has_memory)


def _ticks(labels: list[str]) -> dict[str, Any]:
    return {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5]}


def _link_ticks(links: list[str]) -> dict[str, Any]:
    ticks = _ticks(links)
    if len(links) > _MOST_LINK_TICKS:
        step = -(-len(links) // _MOST_LINK_TICKS)
        ticks |= {"tickvals": ticks["tickvals"][::step], "ticktext": links[::step]}
    return {**ticks, "tickfont": {"size": 9}, "title": {"text": "links", "font": {"size": 11}}}


def _heights(rows: _Rows, links: list[str], shown: bool, has_memory: bool) -> dict[str, Any]:
    """Return the height of the page and the share of each part."""
    link_px = max(len(links) * _LINK_PX, 30) if shown and links else 0
    memory_px = _MEMORY_PX if has_memory else 0
    parts = [part for part in (rows.height_px, link_px, memory_px) if part]
    total = sum(parts) + _GAP_PX * (len(parts) - 1)
    memory = [0.0, memory_px / total]
    after_memory = (memory_px + _GAP_PX) / total if memory_px else 0.0
    links_at = [after_memory, after_memory + link_px / total]
    height = total + _TOP_PX + _BOTTOM_PX
    return {
        "height": height,
        "legend.y": 1 - _TOOLS_PX / height,
        "yaxis.domain": links_at if link_px else [0, 0.001],
        "yaxis.visible": bool(link_px),
        "yaxis2.domain": [1 - rows.height_px / total, 1],
        "legend2.y": memory[1],
        "yaxis3.domain": memory if has_memory else [0, 0.001],
    }


def _add_fold_button(chart: go.Figure, rows: _Rows, links: list[str], shown: bool, has_memory: bool) -> None:
    """Add a button that shows and hides the rows of the links."""
    which = [i for i, trace in enumerate(chart.data) if trace.yaxis == _LINKS]
    chart.data[which[0]].visible = shown
    to_open, to_close = (
        [{"visible": state}, _heights(rows, links, state, has_memory), which] for state in (True, False)
    )
    now, then = (to_close, to_open) if shown else (to_open, to_close)
    button = {"label": f"links ({len(links)})", "method": "update", "args": now, "args2": then}
    place = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 4}}
    chart.update_layout(updatemenus=[{"type": "buttons", "showactive": False, "buttons": [button], **place}])
