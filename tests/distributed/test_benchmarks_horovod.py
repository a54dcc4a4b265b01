"""The data parallel benchmark: two jobs of Horovod take turns and end with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases import cases_of
from benchmarks.runners import horovod
from tests.forked import NEW_PYTHONS_PATH
from tests.zoo import needs_keras_3

(CASE,) = cases_of("data_parallel", True)
WHY_NOT = horovod.why_not(CASE)
pytestmark = [needs_keras_3, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-"), pytest.mark.takes(30)]


def test_tuned_horovod_takes_turns_with_stock_horovod(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", NEW_PYTHONS_PATH)
    tuned = next(way.name for way in CASE.ways if "knobs" in way.options)
    ways = tuple(way for way in CASE.ways if way.name in ("horovod", tuned, "local"))
    parameters = {**CASE.parameters, "steps": 2, "cores": 1.0}
    measured = horovod.run(replace(CASE, ways=ways, parameters=parameters, turns=2))
    assert {len(run.turns_s) for run in measured.ways.values()} == {2}
    assert measured.ways[tuned].bits == measured.stock_bits
    assert measured.ways[tuned].largest_difference == 0
    about = measured.about
    expected = horovod.bandwidth_mbit(1.0, about["gradient_bytes"], about["compute_s"])
    assert about["link_mbit_s"] == expected
