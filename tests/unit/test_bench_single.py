"""Parts of ``tf-ooo bench single`` that need no training."""

from __future__ import annotations

import contextlib
import json
import os

import numpy as np
import pytest

from tf_ooo.bench.single import gpu_day, measuring, pytorch
from tf_ooo.bench.single.cases import AskedWays, Case
from tf_ooo.bench.single.inputs import arrays, digits, resized
from tf_ooo.bench.single.measuring import Worker, rows_of, started, text_of
from tf_ooo.bench.single.networks import NETWORKS, spec_of
from tf_ooo.bench.single.overlap import overlap_of
from tf_ooo.compat.tf_profiler import TracedEvent


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
    seconds = {"xla": [0.2, 0.1, 0.4], "early": [0.1, 0.1, 0.05]}
    turns = {way: [{"step_s": step_s, "peak_bytes": 7} for step_s in taken] for way, taken in seconds.items()}
    rows = rows_of(Case("net", 8), [FakeWorker(["xla", "early"], 0)], turns)
    assert [row["speedup"] for row in rows] == [1.0, 2.0]
    assert rows[1]["step_s_min"] == 0.05
    assert rows[1]["peak_bytes"] == 7
    assert "predicted_peak_bytes" not in rows[1]
    assert "device: cpu" in text_of(rows[0])


def test_what_ours_is_where_stock_did_not_run():
    turns = {"xla": [], "early": [{"step_s": 0.1}]}
    (row,) = rows_of(Case("net", 8), [FakeWorker(["xla", "early"], 0)], turns)
    assert "speedup" not in row
    assert text_of(row)


def test_the_gpu_list_begins_with_the_targets():
    names = [part.name for part in gpu_day.parts(1)]
    assert names[0].startswith("densenet121-k12 batch 32")
    assert names[1].startswith("mobilenetv3l-a0.5 batch 32")
    everything = " ".join(
        text for command in (1, 2, 3) for p in gpu_day.parts(command) for text in p.arguments
    )
    assert all(name in everything for name in NETWORKS if not name.endswith("small"))
    names = [part.name for command in (1, 2, 3) for part in gpu_day.parts(command)]
    assert len(names) == len(set(names))
    assert sum(part.limit_s for part in gpu_day.parts(1)) <= 9.5 * 60, "else the last ones never run"
    assert "fit auto" in gpu_day.parts(2)[0].name


def test_parts_are_noted_and_the_next_runs(tmp_path):
    writes = "import sys, json; json.dump([{'a': 1}], open(sys.argv[-1], 'w')); sys.exit(3)"
    todo = [
        gpu_day.Part("fails", ("-c", writes), 60),
        gpu_day.Part("hangs", ("-c", "import time; time.sleep(60)"), 0.5),
        gpu_day.Part("works", ("-c", writes.replace("3", "0")), 60),
    ]
    done = gpu_day.run(tmp_path, 1, todo, budget_s=100.0)
    assert [part["result"] for part in done] == [
        "failed with 3, see the log", "took longer than 0 s", "done",
    ]  # fmt: skip
    assert json.loads((tmp_path / "rows_1.json").read_text()) == [{"a": 1}, {"a": 1}]
    assert json.loads((tmp_path / "parts_1.json").read_text()) == done


@pytest.mark.timeout(60)
def test_workers_of_a_part_that_is_stopped_end_with_it(tmp_path):
    """A worker holds a pipe open as long as it lives, in whatever state the kernel names it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        "import os, time\n"
        "if not os.fork():\n"
        f"    os.write(os.open({str(pipe)!r}, os.O_WRONLY), b'started')\n"
        "time.sleep(600)"
    )
    read_end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    part = gpu_day.Part("hangs", ("-I", "-S", "-c", code), 4.0, "")
    (done,) = gpu_day.run(tmp_path, 1, [part], budget_s=60.0)
    assert done["result"] == "took longer than 4 s"
    os.set_blocking(read_end, True)
    assert os.read(read_end, 100) == b"started"
    assert os.read(read_end, 100) == b"", "nobody has it open"
    os.close(read_end)


class FakeWorker:
    """Answers; the second one ends in its second round."""

    device, versions, modules = "cpu", {"tensorflow": "2"}, {}

    def __init__(self, names, turns):
        self.names, self.turns = {name: name for name in names}, turns
        self.said = dict.fromkeys(names, "")

    def run(self, name, steps):
        self.turns -= 1
        if self.turns < 0:
            self.names = {}
            self.said[name] = "stopped: the process ended with -9"
            raise RuntimeError("the process ended with -9")
        return {"step_s": 1.0}


def test_a_worker_that_ends_is_noted_and_the_others_go_on(monkeypatch):
    workers = [FakeWorker(["xla"], 99), FakeWorker(["early", "joint"], 2), FakeWorker(["fit"], 0)]
    monkeypatch.setattr(measuring, "workers", lambda *_: contextlib.nullcontext(workers))
    after_each = list(measuring.measure(Case("net", 8), ["xla"], rounds=3, steps=1, more=False))
    assert [[row["schedule"] for row in rows] for rows in after_each] == [["xla", "early", "joint"]] * 3
    notes = {row["schedule"]: row.get("note") for row in after_each[-1]}
    assert notes == {"xla": None, "early": "stopped: the process ended with -9", "joint": None}
    assert {row["tensorflow"] for row in after_each[-1]} == {"2"}
    assert all(row["date"] for row in after_each[-1])


def test_a_process_that_ends_loses_all_its_steps():
    process = started("tf_ooo.bench.nothing_there", Case("net", 8), AskedWays([]))
    worker = Worker(process, "alone, ")
    try:
        worker.names = {"alone, a": "a", "alone, b": "b"}
        with pytest.raises(RuntimeError):
            worker.run("alone, a", 1)
    finally:
        process.close()
    assert not worker.names
    assert worker.said["alone, a"].startswith("stopped: ")
    assert worker.said["alone, b"].startswith("stopped with alone, a: ")


def test_nothing_is_run_without_time(tmp_path):
    done = gpu_day.run(tmp_path, 2, gpu_day.parts(2), budget_s=0.0)
    assert {part["result"] for part in done} == {"not run: the time is spent"}


def test_real_data_are_the_digits_in_the_network_s_shape():
    images, labels = digits()
    assert images.shape == (1797, 8, 8)
    assert set(labels) == set(range(10))
    x, y = next(arrays((17, 17, 3), 4, 100, "real"))
    assert x.shape == (4, 17, 17, 3)
    assert y.dtype == np.int64
    small = resized(images[:2], (8, 8))
    np.testing.assert_array_equal(small, images[:2])
    assert resized(images[:2], (5, 16)).shape == (2, 5, 16)
    first, second = (next(source) for source in [arrays((8, 8), 4, 100, "real")] * 2)
    assert not np.array_equal(first[0], second[0])
    same = arrays((3, 2), 4, 100, "random")
    assert next(same)[0] is next(same)[0]


def test_pytorch_knows_every_network():
    for name in NETWORKS:
        kind, arguments = spec_of(name, size=64)
        assert kind in pytorch.KINDS
        shape = pytorch.shape_of(kind, arguments)
        assert shape[0] == (64 if kind in ("densenet", "application") else arguments["length"])


def test_names_of_cases():
    assert Case("net", 8).name == "net batch 8"
    assert Case("net", 8, "real", 224).name == "net 224x224 batch 8 real"
