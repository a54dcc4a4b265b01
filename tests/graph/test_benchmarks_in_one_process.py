"""The benchmark on one CPU: stock fits and ours take turns and end with the same bits."""

from __future__ import annotations

from benchmarks import models
from benchmarks.cases import Case, cases_of
from benchmarks.runners import one_process


def test_weights_have_the_bits_of_stock_fits(monkeypatch):
    """A small network, in short fits: stock itself is compared with nothing."""
    small = models.Network("mlp", 4, (8,), {"widths": [8]}, classes=4)
    monkeypatch.setitem(models.NETWORKS["ONE_CPU"], "small", small)
    ways = cases_of("one_cpu", True)[0].ways
    case = Case(
        "small", "one_cpu", "one_process", ways, {"networks": "ONE_CPU", "model": "small", "steps": 3}, 2
    )
    measured = one_process.measure(case)
    assert {len(run.turns_s) for run in measured.ways.values()} == {2}
    assert measured.ways.pop("stock fit").bits is None
    assert {run.bits for run in measured.ways.values()} == {measured.stock_bits}
    assert {run.largest_difference for run in measured.ways.values()} == {0.0}
    assert measured.ways["fast_forward"].about["moved_ops"] > 0
