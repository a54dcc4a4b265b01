"""Parts of ``tf-ooo bench single`` that need no training."""

from __future__ import annotations

import pytest

from tf_ooo.bench import gpu_day, single
from tf_ooo.bench.single_overlap import overlap_of
from tf_ooo.compat import TracedEvent


def test_overlap_of_streams():
    def event(line, begin_s, duration_s):
        return TracedEvent("/device:GPU:0", line, "kernel", begin_s, duration_s)

    events = [event("Stream #1", 0.0, 2.0), event("Stream #1", 1.0, 2.0), event("Stream #2", 2.5, 1.5)]
    events += [event("Steps", 0.0, 9.0), TracedEvent("/host:CPU", "Stream #9", "x", 0.0, 9.0)]
    found = overlap_of(events)
    assert found["streams_s"] == {"Stream #1": 3.0, "Stream #2": 1.5}
    assert found["busy_s"] == pytest.approx(4.0)
    assert found["overlapped_s"] == pytest.approx(0.5)


def test_rows_stand_beside_stock_xla():
    taken = {"xla": [0.2, 0.1, 0.4], "early": [0.1, 0.1, 0.05]}
    rows = single.rows_of("net", 8, "cpu", taken, {"early": 7}, {"early": "3 calls"})
    assert [row["speedup"] for row in rows] == [1.0, 2.0]
    assert rows[1]["step_s_min"] == 0.05
    assert rows[1]["peak_bytes"] == 7
    assert "device: cpu" in single.text_of(rows[0])


def test_what_ours_is_where_stock_did_not_run():
    (row,) = single.rows_of("net", 8, "cpu", {"early": [0.1]}, {}, {})
    assert "speedup" not in row
    assert single.text_of(row)


def test_the_gpu_list_begins_with_the_targets(tmp_path):
    names = [name for name, _, _ in gpu_day.parts(tmp_path, quick=False)]
    assert names[:2] == ["target densenet121-k12", "target mobilenetv3l-a0.5"]
    assert len(names) == len(set(names))
    assert len(gpu_day.parts(tmp_path, quick=True)) == 2


def test_nothing_is_run_without_time(tmp_path):
    done = gpu_day.run(tmp_path, quick=True, budget_s=0.0)
    assert {part["result"] for part in done} == {"not run: the time is spent"}
