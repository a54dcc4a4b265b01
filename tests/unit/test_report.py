from __future__ import annotations

import json
import re

from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.simulation.measured import one_by_one
from tf_ooo.report.page import lane_pictures
from tf_ooo.report.report import Report
from tf_ooo.report.sections import CandidateRow, LayerRow, PipelineSection, StageRow
from tf_ooo.units import bytes_text, seconds_text


def make():
    schedule = Schedule("single_device", "in_order", {(0, 0): (Task("dO", 1), Task("dW", 1))})
    layers = [LayerRow(1, "<b>conv</b>", dW=2, U=3, comm=0, own_dO=True)]
    return Report(planned=schedule, ops={"F": 3, "dW": 2}, layers=layers, stock_step_s=0.012)


def test_dict_is_json_and_holds_the_schedule_as_text():
    values = make().to_dict()
    assert json.loads(json.dumps(values)) == values
    assert Schedule.from_text(values["planned"]) == make().planned


def test_page_stands_alone_and_escapes(tmp_path):
    page = make().save_html(tmp_path / "a" / "report.html").read_text()
    assert "&lt;b&gt;conv" in page
    assert "<b>conv" not in page
    assert "src=" not in page


def test_the_page_says_on_what_and_how_it_was_trained(tmp_path):
    report = make()
    report.change(batch_rows=64, environment="tf_ooo 0.1.0, Python 3.11; on CPU x86_64, 2 cores")
    rows = dict(report.rows())
    assert (rows["batch"], rows["device"]) == ("64 rows a step", "CPU x86_64, 2 cores")
    report.change(ranks=2)
    assert dict(report.rows())["batch"] == "64 rows a step, on each of 2 ranks"
    assert "CPU x86_64, 2 cores" in report.save_html(tmp_path / "report.html").read_text()


def test_of_each_schedule_only_the_best_cut_is_compared(tmp_path):
    report = make()
    rows = [CandidateRow("gpipe", 2, reason="needs 3 MB"), CandidateRow("gpipe", 2, 0.013, 10**6)]
    report.change(pipeline=PipelineSection(["CPU:0"], candidates=rows))
    page = report.save_html(tmp_path / "report.html").read_text()
    assert "needs 3 MB" not in page
    assert "13.00 ms" in page


def test_a_plan_that_stays_is_marked_and_not_a_later_one_of_its_name(tmp_path):
    """Planned again with costs of the run, ``modulo`` is predicted otherwise, and is not what runs."""
    report, stages = make(), [StageRow(0, "CPU:0", ["a"], {}, 0, 0, 0, {}, "")]
    rows = [CandidateRow("modulo", 1, 0.0085, 6 * 10**6), CandidateRow("gpipe", 1, 0.0090, 4 * 10**6)]
    section = PipelineSection(["CPU:0"], 0.0088, stages=stages, candidates=rows, predicted_peak_bytes=[5e6])
    report.change(planned=Schedule("pipeline", "modulo"), pipeline=section)
    page = report.save_html(tmp_path / "report.html").read_text()
    marked = page.split('class="marked"')[1].split("</tr>")[0]
    assert re.findall("<td.*?>(.*?)</td>", marked) == ["modulo, the plan that runs", "1", "8.80 ms", "5 MB"]
    rows[0] = CandidateRow("modulo", 1, 0.0088, 6 * 10**6)
    page = report.save_html(tmp_path / "report.html").read_text()
    assert "the plan that runs" not in page


def test_the_page_of_a_stock_step_says_that_the_plan_does_not_run(tmp_path):
    report = make()
    timeline = one_by_one(report.planned, {Task("dO", 1): 1.0})
    report.change(timeline=timeline, measured_timeline=timeline, fell_back=True, fallback_reason="measured")
    page = report.save_html(tmp_path / "report.html").read_text()
    assert "One step: planned, which does not run, and the stock order as measured" in page


def test_trace_has_one_event_per_task(tmp_path):
    trace = json.loads(make().save_trace(tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["dO:1", "dW:1"]
    assert [span["args"]["names"] for span in spans] == [make().layer_names[1]] * 2


def test_summary_of_an_empty_and_a_fallen_back_report():
    assert "nothing has been rewritten" in Report().summary()
    assert "because" in Report(fell_back=True, fallback_reason="because").summary()


def test_units():
    assert (seconds_text(0.0015), seconds_text(2.0), seconds_text(None)) == ("1.50 ms", "2.00 s", "-")
    assert bytes_text(2_500_000) == "2.5 MB"


def test_a_named_schedule_that_is_slower_is_not_praised(tmp_path):
    report = make()
    report.change(kept_because="applied as asked", stock_step_s=1.0, measured_step_s=2.0, moved_ops=3)
    assert report.state.endswith("applied as asked; measured slower than the stock step")
    assert 'class="state back"' in report.save_html(tmp_path / "report.html").read_text()
    report.change(measured_step_s=0.5)
    assert report.state.endswith("(in_order): applied as asked")
    assert 'class="state plain"' in report.save_html(tmp_path / "report.html").read_text()


def test_an_undecided_report_says_so(tmp_path):
    report = make()
    report.change(undecided="3 of 6 steps timed")
    assert report.state == "not decided, 3 of 6 steps timed"
    assert 'class="state back"' in report.save_html(tmp_path / "report.html").read_text()
    report.change(baselines_s={"stock Keras": [0.2, 0.2]}, steps_s=[0.1, 0.1])
    assert "100.00 ms a step instead of 200.00 ms" in report.headline
    assert report.headline.endswith("; not decided, 3 of 6 steps timed")


def test_a_peak_of_unknown_sizes_is_no_number():
    report = Report(unknown_size_ops=1240)
    assert "not known: 1240 tensors" in dict(report.rows())["predicted peak"]
    report.change(predicted_peak_bytes=2_500_000, peak_rows=32)
    assert dict(report.rows())["predicted peak"] == "2.5 MB, batches of 32 rows"
    assert bytes_text(1_500) == "1.5 kB"


def test_a_stock_report_has_no_empty_rows():
    report = Report(fell_back=True, fallback_reason="run_eagerly", model="net", environment="TensorFlow 2")
    rows = dict(report.rows())
    # The state is in the first line.
    assert set(rows) == {"gain", "costs", "mode, schedule", "model", "run"}
    assert "run_eagerly" in rows["gain"]
    assert rows["run"].startswith(report.date)
    assert rows["run"].endswith("TensorFlow 2")


def test_long_labels_fit_their_boxes():
    schedule = Schedule("single_device", "in_order", {(0, 0): (Task("dO", 1), Task("dW", 116))})
    (lane,) = lane_pictures(schedule, {})
    assert lane["box_width"] >= len("dW:116") * 6.6
    assert lane["boxes"][1]["x"] > lane["box_width"]


def test_many_notes_are_cut(tmp_path):
    report = make()
    report.change(notes=[f"note {i}" for i in range(30)])
    page = report.save_html(tmp_path / "report.html").read_text()
    assert "note 19" in page
    assert "note 20" not in page
    assert "and 10 more" in page
