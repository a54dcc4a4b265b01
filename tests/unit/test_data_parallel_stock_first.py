"""Tests whether ranks go on with stock: all decide alike, by what the slowest takes."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_data_parallel_parts import Threads
from tf_ooo.modes.data_parallel import planned, stock_first
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.data_parallel.stock_first import RanksStockFirst, may_wait

TOGETHER = 4


def decided(monkeypatch: pytest.MonkeyPatch, executions: int, step_s: tuple[float, ...]) -> list[Any]:
    """Return what each rank, whose steps take so long, knows in the end; a trace takes 10 s, a plan 2 s."""
    monkeypatch.setattr(planned, "most_seconds", lambda *arguments: 2.0)
    monkeypatch.setattr(stock_first.train_function, "steps_per_execution", lambda model: TOGETHER)
    threads, known = Threads(len(step_s), random.Random(1)), [None] * len(step_s)

    def train(rank: int) -> None:
        ranks: Any = SimpleNamespace(
            model=SimpleNamespace(trainable_weights=[]),
            engine=threads.engine(rank),
            lockstep=SimpleNamespace(of_epoch=8 * executions),
            executions_of_fit=lambda: executions,
            steps_of_fit=lambda: TOGETHER * executions - 1,
        )
        first = RanksStockFirst(ranks, lambda batches: "logs")  # type: ignore[arg-type]

        def timed(steps: Any, batches: Any) -> tuple[Any, float, bool]:
            traced = first.known.seen == 0
            return steps(batches), step_s[rank] + (10.0 / TOGETHER if traced else 0.0), traced

        for _ in range(executions):
            if not (first.known.begins or first.known.why_not):
                assert first.run([None] * TOGETHER, timed) == "logs"
        known[rank] = first.known

    workers = [threading.Thread(target=train, args=(rank,)) for rank in range(len(step_s))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    return known


def test_the_slowest_rank_tells_what_a_fit_takes(monkeypatch):
    """Two traces, a plan and seven executions of 4 s, 50 s, are 5% of 1000 s: 250 executions behind four."""
    for executions, begins in ((4 + 249, False), (4 + 250, True)):
        known = decided(monkeypatch, executions, (0.01, 1.0))
        assert [each.begins for each in known] == [begins] * 2
        assert [each.seen for each in known] == [4, 4]
        assert known[0].steps_s == known[1].steps_s == [1.0] * 3
        assert known[0].why_not == known[1].why_not
    short = decided(monkeypatch, 5, (0.5, 1.0))[0].why_not
    assert short == "19 steps of 1 s are too few to pay for a comparison of about 50 s; compare=True compares"


def test_a_short_execution_tells_nothing(monkeypatch):
    monkeypatch.setattr(stock_first.train_function, "steps_per_execution", lambda model: TOGETHER)
    ranks: Any = SimpleNamespace(
        model=SimpleNamespace(trainable_weights=[]),
        engine=None,
        lockstep=SimpleNamespace(of_epoch=None),
        executions_of_fit=lambda: None,
        steps_of_fit=lambda: None,
    )
    first = RanksStockFirst(ranks, lambda batches: "logs")  # type: ignore[arg-type]
    assert first.run([None], lambda steps, batches: pytest.fail("it is not timed")) == "logs"
    assert (first.known.seen, first.known.steps_s) == (1, [])


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, True),
        ({"compare": False}, True),
        ({"compare": True}, False),
        ({"strict": True}, False),
        ({"profile_steps": 0}, False),
        ({"schedule": "reverse_first_k"}, False),
    ],
)
def test_what_is_asked_for_does_not_wait(options, waits):
    assert may_wait(DataParallel(**options)) is waits


def test_a_slow_link_makes_measuring_it_long():
    """It takes as long as steps that send as many bytes; where steps send little, they tell little."""
    usual_s = planned.most_seconds(0.0, 1e6)
    sent_bytes = (1 + planned._REPEATS) * sum(planned._count(size) * size for size in planned._SIZES)
    assert planned.most_seconds(0.5, sent_bytes / 10) - usual_s == pytest.approx(5.0)
    assert planned.most_seconds(1e-3, 100.0) - usual_s < 1.0
