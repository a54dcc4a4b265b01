"""Recorded steps of ranks: rank 0's tasks, communication among them."""

from __future__ import annotations

import pytest

from tests.distributed import training as t
from tests.zoo import needs_keras_3

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [needs_keras_3, pytest.mark.ranks(2), pytest.mark.takes(40)]


def test_rank_0_records_its_tasks(engine, tmp_path):
    """The bits are those without a timeline."""
    runs = []
    for more in ({}, {"timeline": tmp_path}):
        trained = t.compiled(t.deep(), t.momentum(), steps_per_execution=2)
        options = {"schedule": "reverse_first_k", "profile_steps": 1, **more}
        callback = t.ours(trained, t.data(engine.rank), options=options, epochs=6)
        runs.append((t.bits(trained), callback.report))
    assert runs[0][0] == runs[1][0]
    report = runs[1][1]
    if engine.rank:
        assert report.measured_timeline is None
        return
    assert report.measured_timeline is not None, report.not_measured
    measured = report.measured_timeline.schedule.tasks
    assert {task.kind for task in measured} == {"F", "dO", "dW", "U", "comm"}
    ordered = {task for task in report.planned.tasks if task.kind in ("dO", "dW", "comm") and not task.part}
    assert ordered <= set(measured)
    assert "measured order" in " ".join(report.measured_against_plan)
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
