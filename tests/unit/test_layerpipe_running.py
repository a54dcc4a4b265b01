"""An epoch of rounds: what is run when, whatever the number of batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.modes.layerpipe.ticks import Epoch


class Rounds:
    """Says which batch is in which of its rounds; results are the batches themselves."""

    def __init__(self, last, batch_round, results_round):
        self.last, self.batch_round, self.results_round = last, batch_round, results_round
        self.calls, self.in_round, self.fed, self.given = [], {}, [], -1

    def run(self, low, high, batches):
        fed = [batch for batch in batches if batch is not None]
        self.calls.append((low, high, len(fed)))
        assert len(fed) == (len(batches) if low <= self.batch_round <= high else 0)
        assert len(batches) == 1 or (low, high) == (0, self.last)
        results = [self._one(low, high, batch) for batch in batches]
        return [result for result in results if result is not None]

    def _one(self, low, high, batch):
        number = sum(len(rounds) for rounds in self.in_round.values())
        self.in_round.setdefault(number, []).append((low, high))
        self.fed += [] if batch is None else [batch]
        return self._result(low, high)

    def _result(self, low, high):
        if not low <= self.results_round <= high:
            return None
        self.given += 1
        return self.given


def epoch(count, last, batch_round, results_round, together):
    rounds = Rounds(last, batch_round, results_round)
    left = iter(range(count))
    return rounds, Epoch(rounds, lambda: next(left, None), together)


CASES = st.tuples(st.integers(1, 30), st.integers(0, 7), st.integers(1, 9)).flatmap(
    lambda t: st.tuples(st.just(t), st.integers(0, t[1]), st.integers(0, t[1]))
)


@given(CASES)
def test_all_batches_come_in_and_all_results_come_out(case):
    (count, last, together), a, b = case
    rounds, one = epoch(count, last, min(a, b), max(a, b), together)
    results = list(iter(one.step, None))
    assert results == list(range(count))
    assert rounds.fed == list(range(count))
    # All rounds have run for each batch; those that only read weights may run for one that does not come.
    assert one.rounds == count + last
    seen = [
        sum(low <= r <= high for pairs in rounds.in_round.values() for low, high in pairs)
        for r in range(last + 1)
    ]
    first = rounds.batch_round
    assert seen[first:] == [count] * (last + 1 - first)
    assert all(count <= times <= count + first for times in seen[:first])
    one.drain()
    assert one.rounds == count + last


@given(CASES, st.integers(1, 10))
def test_drained_between_batches(case, after):
    """Whatever has been taken is trained to the end; nothing more is taken."""
    (count, last, together), a, b = case
    rounds, one = epoch(count, last, min(a, b), max(a, b), together)
    for _ in range(min(after, count)):
        one.step()
    one.drain()
    taken = len(rounds.fed)
    assert one.rounds == taken + last
    assert list(iter(one.step, None)) == list(range(min(after, count), taken))


def test_full_rounds_are_run_together():
    rounds, one = epoch(count=20, last=3, batch_round=0, results_round=2, together=4)
    list(iter(one.step, None))
    assert rounds.calls == [
        *((0, high, 1) for high in range(3)),
        *[(0, 3, 4)] * 4,
        (0, 3, 1),
        *((low, 3, 0) for low in (1, 2, 3)),
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_short_epochs_are_run_one_by_one(count):
    rounds, one = epoch(count, last=3, batch_round=0, results_round=2, together=4)
    assert list(iter(one.step, None)) == list(range(count))
    assert all(fed <= 1 for _, _, fed in rounds.calls)
