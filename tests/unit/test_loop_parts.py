"""Tests how many loops recurrent layers run in."""

from __future__ import annotations

import pytest

import tf_ooo
from tf_ooo.modes.pipeline.mesh import loop_parts
from tf_ooo.modes.pipeline.options import AUTO


@pytest.mark.parametrize(
    ("recurrent", "devices", "microbatches", "expected"),
    [(1, 2, 4, 4), (2, 4, 8, 4), (3, 4, 8, 3), (2, 2, 8, 1), (0, 4, 8, 1), (1, 4, 1, 1), (1, 1, 8, 1)],
)
def test_by_itself(recurrent, devices, microbatches, expected):
    assert loop_parts(AUTO, recurrent, devices, microbatches) == expected


def test_as_asked():
    assert loop_parts(3, 0, 2, 1) == 3


@pytest.mark.parametrize("given", [0, -1, 1.5, True, None, "all"])
def test_bad_numbers(given):
    with pytest.raises(tf_ooo.OptionsError, match="loop_parts"):
        tf_ooo.Pipeline(loop_parts=given)
