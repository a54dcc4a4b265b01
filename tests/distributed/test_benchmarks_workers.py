"""The runner on workers, with real ones: turns, plans and bits of a small model."""

from __future__ import annotations

import pytest

from benchmarks.cases import OURS, PYTORCH, STOCK, Case, Way
from benchmarks.machine import confine
from benchmarks.runners import workers
from tests.forked import NEW_PYTHONS_PATH

_WHY_NOT = confine.why_not(with_link=False)
pytestmark = [pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "-"), pytest.mark.takes(50)]


def test_ways_take_turns_and_are_compared_with_stock(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", NEW_PYTHONS_PATH)
    ways = (
        Way("auto", OURS, {"schedule": "auto"}),
        Way("gpipe", PYTORCH, {"schedule": "gpipe"}),
        Way("impossible", PYTORCH, {"schedule": "interleaved_1f1b", "chunks": 9}),
        Way("one device", STOCK, {"stock": "one device"}),
    )
    parameters = {"networks": "MESH", "model": "mlp_few_rows", "devices": 2, "microbatches": 2}
    measured = workers.run(Case("small", "pipeline", "workers", ways, parameters, turns=2))
    assert list(measured.ways) == ["auto", "gpipe", "one device"]
    assert list(measured.not_run) == ["impossible"]
    assert {len(way.turns_s) for way in measured.ways.values()} == {2}
    auto, gpipe, stock = measured.ways.values()
    assert auto.predicted_s > 0
    assert gpipe.about["schedule"] == "gpipe"
    assert gpipe.about["stages"] == 2
    assert auto.bits == gpipe.bits
    assert 0 < auto.largest_difference < 1e-3, "gradients of micro-batches are added up"
    assert (stock.bits, stock.largest_difference) == (measured.stock_bits, 0.0)
