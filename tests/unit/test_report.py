from __future__ import annotations

import json

from tf_ooo.report import Report, bytes_text, seconds_text
from tf_ooo.schedule import Schedule, Task


def make():
    schedule = Schedule("single_device", "in_order", {(0, 0): (Task("dO", 1), Task("dW", 1))})
    layers = [{"index": 1, "name": "<b>conv</b>", "dW": 2, "U": 3, "comm": 0, "own_dO": True}]
    return Report(
        schedule="in_order", planned=schedule, ops={"F": 3, "dW": 2}, layers=layers, stock_step_s=0.012
    )


def test_dict_is_json_and_holds_the_schedule_as_text():
    values = make().to_dict()
    assert json.loads(json.dumps(values)) == values
    assert Schedule.from_text(values["planned"]) == make().planned


def test_page_stands_alone_and_escapes(tmp_path):
    page = make().save_html(tmp_path / "a" / "report.html").read_text()
    assert "&lt;b&gt;conv" in page
    assert "<b>conv" not in page
    assert "src=" not in page


def test_trace_has_one_event_per_task(tmp_path):
    trace = json.loads(make().save_trace(tmp_path / "trace.json").read_text())
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"] == ["dO:1", "dW:1"]


def test_summary_of_an_empty_and_a_fallen_back_report():
    assert "nothing has been rewritten" in Report().summary()
    assert "because" in Report(fell_back=True, fallback_reason="because").summary()


def test_units():
    assert (seconds_text(0.0015), seconds_text(2.0), seconds_text(None)) == ("1.50 ms", "2.00 s", "-")
    assert bytes_text(2_500_000) == "2.5 MB"
