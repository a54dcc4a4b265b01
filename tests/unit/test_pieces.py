"""Tests how many rows a prediction passes through the stages at once."""

from __future__ import annotations

import math

import pytest

from tf_ooo import LayerCosts
from tf_ooo.modes.pipeline.mesh import Pieces, make_mesh, pieces_of
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import PlanRequest

# Layers are for four rows: 60 and 100 bytes of a row at once.
SMALL = LayerCosts(1.0, 1.0, 1.0, activation_bytes=200, weight_bytes=1000, output_bytes=40, slot_bytes=500)
LARGE = LayerCosts(1.0, 1.0, 1.0, activation_bytes=320, weight_bytes=100, output_bytes=80)
LAYERS = (SMALL, SMALL, LARGE, SMALL)


@pytest.mark.parametrize(
    ("pieces", "rows", "sizes"),
    [
        (Pieces(), 1000, (1000,)),
        (Pieces(4, math.inf), 1000, (1000,)),
        (Pieces(4, 10.0), 10, (10,)),
        (Pieces(4, 9.9), 10, (9, 1)),
        (Pieces(4, 9.9), 27, (9, 9, 9)),
        (Pieces(4, 3.0), 10, (4, 4, 2)),
        (Pieces(4, 0.0), 8, (4, 4)),
        (Pieces(4, 0.0), 4, (4,)),
        (Pieces(4, 0.0), 3, (3,)),
        (Pieces(4, 0.0), 0, (0,)),
    ],
)
def test_pieces_of_a_batch(pieces, rows, sizes):
    assert pieces.of(rows) == sizes


def mesh(devices, replicas=1):
    units = units_of(len(LAYERS), [])
    return make_mesh(LAYERS, units, PlanRequest("1f1b", devices, 4, stages=None), (replicas,))


def test_each_device_holds_its_weights_and_one_layer_of_a_batch():
    """Two layers each: 3000 bytes, or 1600, are there all the time."""
    assert mesh(2).plan.problem.bounds == ((0, 1), (2, 3))
    assert pieces_of(mesh(2), 4, 6000) == Pieces(4, min(3000 / 60, 4400 / 100))
    assert pieces_of(mesh(2), 4, 3600) == Pieces(4, min(600 / 60, 2000 / 100))
    assert pieces_of(mesh(2), 4, 1000) == Pieces(4, 0.0)


def test_replicas_count_copies_of_what_others_hold():
    """Half of the slots, and gradients of the others' half."""
    held = 3 * (1000 + (500 + 1000) / 2) + 100 + 100 / 2
    assert pieces_of(mesh(2, replicas=2), 4, 10_000) == Pieces(4, (10_000 - held) / 100)


def test_nothing_is_cut_where_nothing_is_known():
    assert pieces_of(mesh(2), 0, 6000) == pieces_of(mesh(2), 4, None) == Pieces()
