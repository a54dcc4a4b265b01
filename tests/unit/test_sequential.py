"""Tests how often the test on pairs of steps is wrong, however often one looks; and given times."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tf_ooo.fit import comparison
from tf_ooo.fit.comparison import MOST_STEPS, WORTH, look_at

PAIRS = (MOST_STEPS - 2) // 2  # one step of each warms up
TRIALS = 1000
NOISES = {
    "even": lambda draw: draw.uniform(0.95, 1.05),
    "normal": lambda draw: max(0.1, draw.gauss(1.0, 0.05)),
    "long tail": lambda draw: 1.0 + draw.paretovariate(1.5) / 20,
    "interrupted": lambda draw: 1.0 + 0.01 * draw.random() + 9.0 * (draw.random() < 0.1),
}


def decided(draw, gain, noise):
    """A comparison that looks after each pair: "faster", "no gain", or "" if it never knows."""
    stock_s, ours_s = [], []
    for _ in range(PAIRS):
        stock_s.append(noise(draw) * (1 + gain))
        ours_s.append(noise(draw))
        look = look_at(stock_s, ours_s)
        if look.sure:
            return "faster" if look.faster else "no gain"
    return ""


def share(what, gain, noise, trials=TRIALS):
    draw = random.Random(5)
    return sum(decided(draw, gain, noise) == what for _ in range(trials)) / trials


@pytest.mark.parametrize("noise", NOISES)
def test_equal_steps_are_called_faster_in_less_than_5_of_100_cases(noise):
    """2.3 by the law of signs and ranks, whatever the noise is like."""
    assert share("faster", 0.0, NOISES[noise]) <= 0.04


@pytest.mark.parametrize("noise", NOISES)
def test_a_gain_worth_having_is_seldom_called_none(noise):
    assert share("no gain", WORTH, NOISES[noise]) <= 0.12


def test_looks_at_the_usual_level_would_be_wrong_too_often(monkeypatch):
    """Repeated looks have a cost: the test above can fail."""
    monkeypatch.setattr(comparison, "FASTER_LEVEL", 0.025)
    assert share("faster", 0.0, NOISES["normal"]) > 0.05


def test_ten_percent_in_five_percent_of_noise_is_found():
    assert share("faster", 0.10, NOISES["normal"], 300) > 0.95


def test_ten_percent_slower_is_found():
    assert share("no gain", -0.10, NOISES["normal"], 300) > 0.99


def test_no_difference_in_little_noise_is_no_gain_soon():
    draw = random.Random(5)
    stock_s, ours_s = ([draw.uniform(0.999, 1.001) for _ in range(6)] for _ in range(2))
    assert look_at(stock_s, ours_s).no_gain


@pytest.mark.parametrize("pairs", range(1, 7))
def test_of_six_pairs_or_fewer_none_is_sure_to_be_faster(pairs):
    """All signs alike come by chance in one of 2^6 cases."""
    look = look_at([2.0] * pairs, [1.0] * pairs)
    assert not look.faster
    assert look.interval is None


def test_seven_pairs_that_all_say_so_are_not_enough_and_eight_are():
    """1/2^7 is above the level of a look, 1/2^8 below."""
    assert not look_at([2.0] * 7, [1.0] * 7).sure
    look = look_at([2.0] * 8, [1.0] * 8)
    assert look.faster
    assert look.interval == pytest.approx((2.0, 2.0))


def test_equal_seconds_are_not_faster():
    look = look_at([1.0] * PAIRS, [1.0] * PAIRS)
    assert look.no_gain
    assert not look.faster


def test_a_longer_list_counts_up_to_the_shorter_one():
    assert look_at([2.0] * 9, [1.0] * 8) == look_at([2.0] * 8, [1.0] * 8)


def test_nothing_is_known_of_nothing():
    assert not look_at([], []).sure


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=1, max_size=PAIRS))
def test_as_scipy_has_it(pairs):
    """Ratios are all different, and none of them is 1: so many signs come by chance."""
    stock_s, ours_s = zip(*pairs, strict=True)
    ratios = [a / b for a, b in pairs]
    look = look_at(stock_s, ours_s)
    logarithms = [math.log(ratio) for ratio in ratios]
    sizes = sorted(map(abs, logarithms))
    if sizes[0] < 1e-9 or any(b - a < 1e-9 for a, b in zip(sizes, sizes[1:], strict=False)):
        return
    p = stats.wilcoxon(logarithms, alternative="greater", method="exact").pvalue
    assert look.faster == (p <= comparison.FASTER_LEVEL)
    assert look.pairs == len(pairs)
