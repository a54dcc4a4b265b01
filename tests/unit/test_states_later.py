"""Compares what a state will be so many steps later with the loop that computes it."""

from __future__ import annotations

import numpy as np
import pytest

from tf_ooo.tracing.states import in_steps

RULES = {
    "count": (lambda s: s + 1, np.int64(5)),
    "ramp": (lambda s: s + np.float64(1e-3), np.float64(0.25)),
    "decay": (lambda s: s * 0.9, np.array([3.0, -1.0])),
    "average": (lambda s: 0.99 * s + 0.01 * 7.0, np.array([0.0, 9.0])),
    "fixed": (lambda s: s, np.array([2.0, 0.0])),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("steps", [1, 3, 99])
def test_as_the_loop(name, steps):
    rule, start = RULES[name]
    now = np.asarray(start)
    expected = now
    for _ in range(steps):
        expected = np.asarray(rule(expected), now.dtype)
    once = np.asarray(rule(now), now.dtype)
    later = in_steps(steps, now, once, np.asarray(rule(once), now.dtype))
    assert later.dtype == now.dtype
    np.testing.assert_allclose(later, expected, rtol=1e-9)


def test_what_grows_faster_goes_on_evenly():
    assert in_steps(10, np.asarray(1.0), np.asarray(2.0), np.asarray(4.0)) == 11.0


def test_small_integers_stay_in_their_range():
    numbers = (np.asarray(number, np.int8) for number in (1, 2, 3))
    assert in_steps(1_000, *numbers) == 127


def test_what_is_no_number_is_as_after_two_steps():
    assert in_steps(1_000, np.asarray(False), np.asarray(False), np.asarray(True))
