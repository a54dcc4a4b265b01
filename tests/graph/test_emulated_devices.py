"""A short run on emulated devices: the order that was planned ran, and weights are stock's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases import cases_of
from benchmarks.runners import emulated

pytestmark = pytest.mark.takes(30)


def test_planned_orders_run():
    like = cases_of("emulated", True)[0]
    sizes = {"devices": 2, "layers": 4, "microbatches": 2, "task_s": 0.002}
    small = replace(like, parameters={**like.parameters, **sizes})
    ways = tuple(way for way in small.ways if way.name in ("1f1b", "zb_v", "dualpipe_v", "auto"))
    assert emulated.why_not(small) == ""
    measured = emulated.run(replace(small, ways=ways, turns=2))
    assert measured.ways.keys() == {"1f1b", "zb_v", "auto"}
    assert "no fewer micro-batches than stages" in measured.not_run["dualpipe_v"]
    for run in measured.ways.values():
        assert run.about["violations"] == 0
        assert run.about["pairs"] > 0
        assert len(run.turns_s) == 2
        assert min(run.turns_s) >= run.about["simulated_s"]
        assert run.predicted_s >= run.about["simulated_s"]
        assert run.largest_difference < 1e-6
    assert len({run.bits for run in measured.ways.values()}) == 1
