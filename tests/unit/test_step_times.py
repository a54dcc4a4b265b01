"""Tests whose turn it is, and which samples are compared, on steps that are not alike."""

from __future__ import annotations

import itertools
import random

import pytest

from tf_ooo.fit.comparison import MOST_STEPS, REWRITTEN, STOCK, Comparison, StepTimes

PROFILED = 3


def fit(times, kinds, seconds_of, most=400):
    """Steps on inputs of these kinds until it is known which to keep: (what ran, on what)."""
    ran = []
    for kind in itertools.islice(kinds, most):
        if times.done:
            return ran
        which = times.next
        times.add(which, seconds_of(which, kind), False, kind)
        ran.append((which, kind))
    raise AssertionError(f"not decided after {most} steps: {times.progress}")


def length_of(which, kind):
    """All ways take the same time; a short batch takes a tenth."""
    return 0.1 if kind == "short" else 1.0


class TestKinds:
    @pytest.mark.parametrize("rewrites", [1, 2, 4])
    @pytest.mark.parametrize("pattern", ["WS", "SW", "WWS", "WSS", "W" * 9 + "S", "WSSWSWSW"])
    @pytest.mark.parametrize("stock_first", [True, False])
    def test_a_short_batch_does_not_decide(self, rewrites, pattern, stock_first):
        times = StepTimes(PROFILED, stock_first, [f"way {n}" for n in range(rewrites)], rewrites > 1)
        kinds = itertools.cycle("whole" if letter == "W" else "short" for letter in pattern)
        ran = fit(times, kinds, length_of)
        found = times.seconds
        assert len(set(itertools.chain.from_iterable(found.values()))) == 1, "of one kind"
        assert min(map(len, found.values())) >= PROFILED or times.steps == MOST_STEPS
        compared = Comparison.of(found)
        assert compared.rewritten_s >= compared.stock_s, "no way is faster"
        assert not times.look.faster
        assert len(ran) <= (MOST_STEPS if rewrites > 1 else 6 * len(pattern) * (1 + PROFILED))

    @pytest.mark.parametrize("shape", [lambda number: number, lambda number: number % 30])
    def test_inputs_that_are_never_alike_are_compared_in_the_end(self, shape):
        times = StepTimes(PROFILED, True)
        fit(times, map(shape, itertools.count()), lambda which, kind: 1.0)

    def test_a_kind_that_does_not_come_back(self):
        times = StepTimes(PROFILED, True)
        fit(times, itertools.chain(["first"], itertools.repeat("rest")), lambda which, kind: 1.0)
        assert {name: len(found) for name, found in times.seconds.items()} == {STOCK: 3, REWRITTEN: 3}

    def test_partial_executions_are_nobodys_turn(self):
        """Data parallel has it like this: every other execution is marked as no sample."""
        times = StepTimes(PROFILED, True)
        for number in range(40):
            times.add(times.next, 1.0, traced=number % 2 == 1)
        assert times.done
        assert min(map(len, times.seconds.values())) >= PROFILED

    def test_turns_follow_from_the_calls(self):
        """Ranks measure different seconds and run the same."""
        kinds = ["W", "W", "S", "W", "S", "S", "W", "W", "W", "S"] * 4
        ran = []
        for factor in (1.0, -7.0):
            times = StepTimes(PROFILED, True)
            turns = []
            for number, kind in enumerate(kinds):
                turns.append(times.next)
                times.add(turns[-1], factor * number, number in (3, 4), kind)
            ran.append(turns)
        assert ran[0] == ran[1]

    def test_the_first_step_on_each_kind_warms_up(self):
        times = StepTimes(1, True)
        counted = [times.add(times.next, 1.0, False, kind) for kind in "AABAA"]
        assert counted == [False, False, False, True, True]


class TestConfirmed:
    def lucky(self, first_s, later_s):
        """Return how long a way takes in the first round, and then."""
        taken = []

        def seconds_of(which, kind):
            if which != "lucky":
                return 1.0
            taken.append(which)
            return first_s if len(taken) <= 1 + 2 else later_s

        return seconds_of

    def test_the_best_of_several_may_only_have_been_lucky(self):
        times = StepTimes(PROFILED, True, ["even", "lucky"], until_sure=True)
        ran = fit(times, itertools.repeat("W"), self.lucky(0.9, 1.1))
        assert [which for which, _ in ran[9:]] == [STOCK, "lucky"] * 6
        why_not = Comparison.of(times.seconds).why_not_after(times.look, times.steps)
        assert "1.10 s a step against 1.00 s" in why_not
        assert "; again: stock 1.00 s, lucky 1.10 s" in times.shown()

    def test_one_that_is_faster_stays(self):
        times = StepTimes(PROFILED, True, ["even", "lucky"], until_sure=True)
        fit(times, itertools.repeat("W"), self.lucky(0.9, 0.9))
        assert Comparison.of(times.seconds).best == "lucky"
        assert times.look.faster
        assert times.progress == "25 of at most 40 steps compared"

    def test_one_way_was_not_picked_out_of_several(self):
        times = StepTimes(PROFILED, True, ["lucky"], until_sure=True)
        ran = fit(times, itertools.repeat("W"), self.lucky(0.9, 0.9))
        assert len(ran) == 2 * (1 + 8)

    @pytest.mark.parametrize("rewrites", range(1, 6))
    def test_no_more_than_40_steps(self, rewrites):
        """Every other pair says the opposite: it is never sure.  Five ways leave eleven pairs."""
        draw = random.Random(rewrites)
        times = StepTimes(PROFILED, True, [f"way {n}" for n in range(rewrites)], until_sure=True)
        ran = fit(times, itertools.repeat("W"), lambda which, kind: draw.uniform(0.5, 1.5))
        assert len(ran) <= MOST_STEPS
        assert not times.look.faster
        assert times.look.pairs == (11 if rewrites == 5 else times.look.pairs)

    def test_a_winner_that_fails_gives_way_to_the_next(self):
        times = StepTimes(1, True, ["a", "b", "c"], until_sure=True)
        speeds = {STOCK: 1.0, "a": 0.9, "b": 0.8, "c": 1.0}
        while "again" not in times.shown():
            which = times.next
            times.add(which, speeds[which], False)
        times.drop("b")
        times.add("b", 0.8, False)  # the step in which it failed
        fit(times, itertools.repeat(None), lambda which, kind: speeds[which])
        assert times.seconds == {STOCK: [1.0] * 8, "a": [0.9] * 8}


@pytest.mark.parametrize(
    ("stock_s", "rewritten_s", "noise_s"),
    [
        ((10.0, 10.1, 12.0), (9.0, 9.0, 9.0), 1.9),  # of three steps the largest distance
        ((10.0, 10.1, 90.0), (9.0, 9.0, 9.0), 0.1),  # an interrupted one does not count
        ((10.0, 10.0, 10.1, 10.3, 12.0), (9.0,), 0.2),  # of five the fourth
        ((10.0,), (9.0,), 0.0),
    ],
)
def test_noise(stock_s, rewritten_s, noise_s):
    found = Comparison.of({STOCK: stock_s, REWRITTEN: rewritten_s})
    assert found.noise_s == pytest.approx(noise_s)
