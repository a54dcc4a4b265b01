from __future__ import annotations

import random

import pytest

from tests.unit.cyclic_optimum import cyclic_optimum
from tests.unit.exact_optimum import (
    INSTANCES,
    POLICIES,
    ExactLayer,
    costs,
    instance,
    optimum,
    period_s,
    rows,
)

pytest.importorskip("ortools")

pytestmark = pytest.mark.takes(20)
ALLOWED = 1.02


def check(found, count):
    found = list(found)
    assert len(found) == count
    for row in found:
        assert row["optimum_s"] == row["optimum_bound_s"], row
        for policy in POLICIES:
            assert row[policy] >= row["optimum_bound_s"] - 1e-6, (policy, row)
        for policy in ("search", "auto"):
            assert row[policy] <= ALLOWED * row["optimum_s"], (policy, row)


def test_within_two_percent_of_the_optimum():
    check(rows(12, seed=1, evaluations=1000), 12)


@pytest.mark.slow
def test_within_two_percent_of_the_optimum_on_all():
    check(rows(), INSTANCES)


def test_optimum_by_hand():
    # The instance of test_search_beats_every_k_by_hand: 32, worked out there.
    layers = [
        ExactLayer(3, 2, 9, 9, 0, ()),
        ExactLayer(3, 1, 1, 11, 0, (0,)),
        ExactLayer(1, 1, 9, 8, 0, (1,)),
    ]
    assert optimum(layers).period == 32
    assert period_s("search", layers, 1000, slice_bytes=0) == 32


def test_both_formulations_agree():
    """The cyclic one assumes nothing about steps; small numbers, because it is slow."""
    draw = random.Random(5)
    for _ in range(4):
        layers = [
            ExactLayer(*(draw.randint(1, 6) for _ in range(3)), draw.randint(0, 9), draw.choice([0, 1]),
                       (number - 1,) if number else ())
            for number in range(draw.randint(2, 3))
        ]  # fmt: skip
        cyclic = cyclic_optimum(layers, limit_s=30)
        assert cyclic.period == cyclic.bound == optimum(layers).period


def test_slices_are_never_worse():
    draw = random.Random(2)
    for _ in range(5):
        layers = instance(draw)
        whole = period_s("search", layers, 500, slice_bytes=0)
        from_all = period_s("search", layers, 500, progress=None)
        assert from_all <= whole * (1 + 1e-9)
        assert from_all >= max(
            sum(layer.communication for layer in layers),
            sum(layer.forward + layer.output_grad + layer.weight_grad for layer in layers),
        )
        assert len(costs(layers)) == len(layers)
