"""Every picture holds every event."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter

import numpy as np
import pytest

from tf_ooo.costs import LayerCosts, Link
from tf_ooo.errors import BackendError
from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.pictures import page, style
from tf_ooo.planning.pictures.figure import Run, figure
from tf_ooo.planning.pictures.page import render
from tf_ooo.planning.pictures.png import draw
from tf_ooo.planning.pictures.style import COLOURS, bars_of, curve_points, lane_label, links_of, view_of
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.rewriting.plan import plan
from tf_ooo.units import bytes_text, time_text

SECOND_BY_SECOND = """tf_ooo schedule v1
mode pipeline
policy by_hand
microbatches 2
lane 0 0: F:0@0 F:0@1 dO:0@0 dW:0@0 dO:0@1 dW:0@1 U:0@0
lane 1 0: F:1@0 dO:1@0 dW:1@0 F:1@1 dO:1@1 dW:1@1 U:1@0
"""
COSTS = (
    LayerCosts(1, 1, 1, 1, activation_bytes=100, weight_bytes=10, output_bytes=5),
    LayerCosts(1, 2, 1, 1, activation_bytes=30, weight_bytes=20, output_bytes=5),
)


@pytest.fixture(name="timeline")
def _timeline():
    return simulate(Schedule.from_text(SECOND_BY_SECOND), COSTS)


@pytest.fixture(name="sending")
def _sending():
    """Three steps with messages that take time and with unequal costs."""
    return simulate(Schedule.from_text(SECOND_BY_SECOND), COSTS, Link(0.25, 10), steps=3)


def _data_parallel():
    layers = [LayerCosts(1 + i, 2, 3, 0.5, 40, 30, 5) for i in range(4)]
    schedule = plan(
        layers=layers, schedule="fast_forward", devices=4, link=Link(0.1, 50), mode="data_parallel"
    )
    return simulate(schedule, layers, Link(0.1, 50), steps=2)


def test_streams_are_named():
    schedule = _data_parallel().schedule
    labels = [lane_label(schedule, lane) for lane in schedule.lanes]
    assert labels == ["device 0 main", "device 0 comm", "device 0 update"]


@pytest.mark.parametrize(
    "made", [_data_parallel(), simulate(Schedule.from_text(SECOND_BY_SECOND), COSTS, steps=2)]
)
def test_page_holds_every_event(made):
    drawn = figure([Run(made, view_of(made, 1000, 10))])
    bars = [trace for trace in drawn.data if trace.type == "bar" and trace.yaxis == "y2"]
    assert Counter(trace.legendgroup for trace in bars for _ in trace.base) == Counter(
        event.task.kind for event in made.events
    )
    rows = np.concatenate([trace.customdata for trace in bars])
    shown = sorted(tuple(row[[0, 3, 5, 6, 7]].tolist()) for row in rows)
    events = [(e.task.stage, e.task.microbatch, e.step, e.start_s, e.end_s) for e in made.events]
    assert np.allclose(shown, sorted(events), rtol=1e-6)
    assert all(trace.marker.color == COLOURS[trace.legendgroup] for trace in bars)


def test_page_holds_messages_and_memory(sending):
    drawn = figure([Run(sending, view_of(sending, 1000, 10))])
    messages = [trace for trace in drawn.data if trace.type == "bar" and trace.yaxis == "y"]
    assert sum(len(trace.base) for trace in messages) == len(sending.messages) == 12
    curves = [trace for trace in drawn.data if trace.type == "scatter"]
    assert [max(trace.y) for trace in curves] == sending.peak_bytes


def test_page_is_small_and_needs_no_network(timeline, tmp_path):
    """The script that draws it lies beside it, once for all pages of a folder."""
    folder = tmp_path / "new folder"
    timeline.save_html(folder / "page.html")
    script = folder / "plotly.min.js"
    written = script.stat().st_mtime_ns
    timeline.save_html(folder / "again.html")
    assert script.stat().st_mtime_ns == written
    page_html = (folder / "page.html").read_text()
    assert re.findall('src="([^"]*)"', page_html) == ["plotly.min.js"]
    assert "https://" not in page_html.replace("https://plot.ly", "")
    assert len(page_html) < 100_000
    assert "by_hand, pipeline, 2 devices, 2 micro-batches" in page_html
    assert "27.27%" in page_html
    assert "11 s" in page_html


def test_bars_say_the_names_of_layers(timeline):
    names = {0: "embedding", 1: "<dense>"}
    run = Run(timeline, view_of(timeline, 1000, 10), "", names)
    bars = [trace for trace in figure([run]).data if trace.type == "bar" and trace.yaxis == "y2"]
    texts = {
        (int(row[0]), text)
        for trace in bars
        for row, text in zip(trace.customdata, trace.hovertext, strict=True)
    }
    assert texts == {(0, "stage 0: embedding"), (1, "stage 1: &lt;dense&gt;")}
    assert all("%{hovertext}" in trace.hovertemplate for trace in bars)


def test_a_limit_is_a_line_over_the_memory(timeline):
    drawn = figure([Run(timeline, view_of(timeline, 1000, 10))], limits_bytes=[150])
    (line,) = drawn.layout.shapes
    assert (line.yref, line.y0) == ("y3", 150)


def test_limits_of_devices_are_lines_of_their_own(timeline):
    drawn = figure([Run(timeline, view_of(timeline, 1000, 10))], limits_bytes=[200, 150])
    assert [line.y0 for line in drawn.layout.shapes] == [150, 200]
    texts = [note.text for note in drawn.layout.annotations]
    assert texts == ["limit of device 1 150 bytes", "limit of device 0 200 bytes"]


def test_a_limit_far_above_is_named_and_not_drawn(timeline):
    """Its line would press the curves down to nothing."""
    drawn = figure([Run(timeline, view_of(timeline, 1000, 10))], limits_bytes=[10_000])
    assert not drawn.layout.shapes
    assert [note.text for note in drawn.layout.annotations] == ["limit 10 kB, above the picture ↑"]


def test_links_that_keep_nobody_waiting_are_left_out(timeline, sending):
    assert len(timeline.messages) > 0
    for run, shown in ((timeline, False), (sending, True)):
        drawn = figure([Run(run, view_of(run, 1000, 10))])
        assert any(trace.name == "message" for trace in drawn.data) is shown
        assert bool(drawn.layout.updatemenus) is shown


def test_a_stage_of_late_gradients_is_no_layer():
    schedule = Schedule.from_text(SECOND_BY_SECOND)
    late = dataclasses.replace(schedule, mode="layerpipe", stages=((0, 2), (3, 3)))
    assert style.what_a_stage_is(late) == "stage"


def test_what_numbers_say(timeline):
    assert style.numbers_text(timeline.schedule) == "o1: dO of micro-batch 1"
    assert style.numbers_text(_data_parallel().schedule) == "o3: dO of layer 3"


@pytest.mark.parametrize(
    ("lanes", "said"),
    [
        # A round of PipeDream: three stages, of which the last two have a dO.
        ("lane 0 0: F:0\nlane 1 0: F:1 dO:1\nlane 2 0: F:2 dO:2\n", "o2: dO of stage 2"),
        ("microbatches 2\nlane 0 0: F:0 dO:0 F:1 dO:1 dO:1@1 dO:0@1\n", "0o1: dO of stage 0, micro-batch 1"),
        ("microbatches 2\nlane 0 0: F:0 F:0@1\n", "F1: F of micro-batch 1"),
        ("lane 0 0: dW:4\n", "w4: dW of stage 4"),
        ("", "o3: dO of stage 3"),  # nothing is drawn
    ],
)
def test_numbers_are_explained_by_a_box_that_is_there(lanes, said):
    schedule = Schedule.from_text(f"tf_ooo schedule v1\nmode pipeline\npolicy byhand\n{lanes}")
    assert style.numbers_text(schedule) == said


def test_streams_have_names_that_differ():
    """Updates on two streams, as measured, and two streams that are for nothing else."""
    head = "tf_ooo schedule v1\nmode data_parallel\npolicy byhand\nworkers 2\n"
    lanes = ["0 0: F:0 dO:0", "0 1: dW:0", "0 2: comm:0", "0 3: U:0", "0 4: U:1", "1 0: F:1"]
    schedule = Schedule.from_text(head + "".join(f"lane {lane}\n" for lane in lanes))
    names = list(style.stream_names(schedule, list(schedule.lanes)).values())
    alone = ["gradient exchange", "updates", "updates 2", "tasks"]
    assert names == ["main stream", "sub stream", *alone]
    measured = style.stream_names(schedule, list(schedule.lanes), measured=True)
    assert list(measured.values()) == ["tasks", "tasks 2", *alone]


def test_the_trace_names_layers_and_streams(tmp_path):
    lanes = "stage 0: 0-2\nstage 1: 3-3\nlane 0 0: F:0 dO:0 dW:0\nlane 1 0: F:1 dO:1 dW:1\n"
    schedule = Schedule.from_text(f"tf_ooo schedule v1\nmode pipeline\npolicy byhand\n{lanes}")
    timeline = simulate(schedule, [LayerCosts(1, 1, 1)] * 4)
    timeline.save_trace(tmp_path / "named.json", {0: "embedding", 2: "block <2>", 3: "head"})
    timeline.save_trace(tmp_path / "plain.json")
    named, plain = (
        json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"] for name in ("named", "plain")
    )
    spans = {event["name"]: event["args"] for event in named if event["ph"] == "X"}
    assert spans["dO:0"]["names"] == "embedding .. block <2> (3 layers)"
    assert spans["F:1"]["names"] == "head"
    assert not any("names" in event["args"] for event in plain if event["ph"] == "X")
    assert [e["args"]["name"] for e in named if e["name"] == "thread_name"][:2] == ["tasks", "tasks"]


def test_measured_beside_predicted(timeline, sending):
    drawn = figure(
        [
            Run(timeline, view_of(timeline, 99, 9), "predicted"),
            Run(sending, view_of(sending, 99, 9), "measured"),
        ]
    )
    assert list(drawn.layout.yaxis2.ticktext) == [
        "device 0 predicted",
        "device 0 measured",
        "device 1 predicted",
        "device 1 measured",
    ]
    bars = [trace for trace in drawn.data if trace.type == "bar" and trace.yaxis == "y2"]
    assert sum(len(trace.base) for trace in bars) == len(timeline.events) + len(sending.events)
    html = render(timeline, sending)
    assert "<small>measured</small>" in html
    assert "one step, from first to last task" in html


def test_trace_is_a_chrome_trace(sending, tmp_path):
    path = tmp_path / "trace.json"
    sending.save_trace(path)
    trace = json.loads(path.read_text())
    kinds = Counter(event["ph"] for event in trace["traceEvents"])
    assert set(kinds) == {"X", "M", "C"}
    assert kinds["X"] == len(sending.events) + len(sending.messages)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
    tasks = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "message"]
    shown = sorted((e["ts"], e["pid"], e["tid"], e["name"], e["args"]["step"]) for e in tasks)
    assert shown == sorted((e.start_s * 1e6, e.device, e.stream, str(e.task), e.step) for e in sending.events)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"device 0", "device 1", "links"}
    memory = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 0]
    assert max(memory) == sending.peak_bytes[0]


def test_png_holds_every_event(sending, tmp_path):
    above, below = draw(sending).axes
    assert sum(len(boxes.get_paths()) for boxes in above.collections) == len(sending.events)
    assert len(below.lines) == 2
    sending.save_png(tmp_path / "a" / "t.png")
    assert (tmp_path / "a" / "t.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BackendError, match="t.nonsense"):
        sending.save_png(tmp_path / "t.nonsense")


def test_what_does_not_fit_is_cut_and_said(sending, caplog):
    view = view_of(sending, most_tasks=10, most_lanes=9)
    bars = bars_of(sending, view)
    assert len(bars) == 10
    assert f"(10 of {len(sending.events)} tasks)" in view.note
    assert view.note in caplog.text
    assert bars.start_s.max() < view.until_s
    assert (links_of(sending, view)[2].start_s < view.until_s).all()


def test_the_page_says_what_it_leaves_out(sending, monkeypatch):
    monkeypatch.setattr(page, "MOST_TASKS", 10)
    assert "Only a part is shown" in render(sending)
    assert "Only a part" in render(sending, sending)


def test_some_devices_of_many():
    lanes = "".join(f"lane {i} 0: F:{i} dO:{i} dW:{i}\n" for i in range(10))
    text = f"tf_ooo schedule v1\nmode pipeline\npolicy p\n{lanes}"
    timeline = simulate(Schedule.from_text(text), [LayerCosts(1, 1, 1)] * 10)
    view = view_of(timeline, 1000, 4)
    assert view.devices == [0, 3, 6, 9]
    assert "4 of 10 devices" in view.note


def test_curve_keeps_its_peak_when_thinned():
    time_s = np.arange(100_000.0)
    alive = np.where(time_s == 54_321, 7.0, time_s % 3)
    shown_s, shown = curve_points(MemoryCurve(time_s, alive), float("inf"), 100_000.0)
    assert len(shown_s) < 6000
    assert shown.max() == 7
    assert (np.diff(shown_s) >= 0).all()


def test_a_run_without_memory_that_takes_no_time(tmp_path):
    schedule = Schedule.from_text(SECOND_BY_SECOND)
    times_s = np.zeros((1, len(schedule.tasks)))
    nothing = Timeline(schedule, times_s, times_s)
    assert "not known" in render(nothing)
    nothing.save_png(tmp_path / "t.png")
    nothing.save_trace(tmp_path / "t.json")


def test_a_steady_step_that_takes_long_to_simulate_is_left_open(timeline, monkeypatch):
    assert style.steady_step_s(timeline) == timeline.steady_step_s
    monkeypatch.setattr(style, "_MOST_TO_REPEAT", 3)
    assert style.steady_step_s(timeline) is None
    assert "<dd>-</dd>" in render(timeline)


def test_units():
    assert [time_text(s) for s in (2, 0.0125, 3e-6)] == ["2 s", "12.5 ms", "3 µs"]
    assert [bytes_text(b) for b in (12, 2500, 3e9)] == ["12 bytes", "2.5 kB", "3 GB"]
