"""Tests whether ranks go on with stock: all decide alike, by what the slowest takes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_data_parallel_parts import Threads
from tf_ooo.fit import mode
from tf_ooo.fit.mode import StockFirst, Training
from tf_ooo.hosts.ranks.base import SingleEngine
from tf_ooo.modes.data_parallel import planning, scheduled
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.data_parallel.scheduled import ScheduledSteps
from tf_ooo.report.report import Report

TOGETHER = 4


class Stock:
    """Steps whose outputs are the seconds that they take; the first call takes 10 s more, as it traces."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.traced = step_s, 0

    def __call__(self, batches: Any) -> float:
        traces, self.traced = not self.traced, 1
        return TOGETHER * self.step_s + 10.0 * traces

    def function(self, count: int) -> None:
        """Nothing draws random numbers."""


class Functions:
    """The functions of ranks whose stock steps are made up."""

    source = SimpleNamespace(most=TOGETHER)

    def __init__(self, ranks: Any) -> None:
        self.model, self.engine, self._stock = ranks.model, ranks.engine, ranks.stock

    def unrolled(self, source: object, steps: int) -> Any:
        return self._stock


def timed(run: Callable[[], Any], traces: Callable[[], int]) -> tuple[float, float, bool]:
    before, seconds = traces(), run()
    return seconds, seconds, traces() > before


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "most_seconds", lambda *arguments: 2.0)
    monkeypatch.setattr(scheduled.train_function, "steps_per_execution", lambda model: TOGETHER)
    monkeypatch.setattr(scheduled, "RankFunctions", Functions)
    monkeypatch.setattr(scheduled, "Profiling", lambda *arguments: Training())
    monkeypatch.setattr(scheduled.traces, "random_state", lambda function: "")
    monkeypatch.setattr(mode, "timed_run", timed)


def steps_of(step_s: float, executions: int | None, engine: Any = None, **options: Any) -> ScheduledSteps:
    """Return a rank's steps in a fit of so many executions, the last of which is shorter."""
    ranks: Any = SimpleNamespace(
        model=SimpleNamespace(trainable_weights=[]),
        engine=engine or SingleEngine(),
        lockstep=SimpleNamespace(of_epoch=None if executions is None else 8 * executions),
        executions_of_fit=lambda: executions,
        steps_of_fit=lambda: None if executions is None else TOGETHER * executions - 1,
        stock=Stock(step_s),
    )
    return ScheduledSteps(ranks, DataParallel(**options), Report())


def decided(executions: int, step_s: tuple[float, ...]) -> list[Any]:
    """Return what each rank, whose steps take so long, knows in the end; a trace takes 10 s, a plan 2 s."""
    threads, known = Threads(len(step_s), random.Random(1)), [None] * len(step_s)

    def train(rank: int) -> None:
        steps = steps_of(step_s[rank], executions, threads.engine(rank))
        first: Any = steps.experiment.phase
        for _ in range(executions):
            if not (first.budget.begins or first.budget.why_not):
                assert steps([None] * TOGETHER) >= TOGETHER * step_s[rank]
        known[rank] = first.budget
        assert first.budget.begins == (steps.experiment.phase is not first)
        assert first.budget.why_not == steps.report.fallback_reason

    workers = [threading.Thread(target=train, args=(rank,)) for rank in range(len(step_s))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    return known


def test_the_slowest_rank_tells_what_a_fit_takes():
    """Two traces, a plan and seven executions of 4 s, 50 s, are 5% of 1000 s: 250 executions behind four."""
    for executions, begins in ((4 + 249, False), (4 + 250, True)):
        known = decided(executions, (0.01, 1.0))
        assert [each.begins for each in known] == [begins] * 2
        assert [each.seen for each in known] == [4, 4]
        assert known[0].steps_s == known[1].steps_s == [1.0] * 3
        assert known[0].why_not == known[1].why_not
    short = decided(5, (0.5, 1.0))[0].why_not
    assert "about 50 s: about 1,000 would; compare=True" in short


def test_a_short_execution_tells_nothing():
    steps = steps_of(1.0, None)
    steps([None])
    first: Any = steps.experiment.phase
    assert (first.budget.seen, first.budget.steps_s) == (1, [])


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
    assert isinstance(steps_of(1.0, 9, **options).experiment.phase, StockFirst) is waits


def test_a_slow_link_makes_measuring_it_long(monkeypatch):
    """It takes as long as steps that send as many bytes; where steps send little, they tell little."""
    monkeypatch.undo()
    usual_s = planning.most_seconds(0.0, 1e6)
    sent_bytes = (1 + planning._REPEATS) * sum(planning._count(size) * size for size in planning._SIZES)
    assert planning.most_seconds(0.5, sent_bytes / 10) - usual_s == pytest.approx(5.0)
    assert planning.most_seconds(1e-3, 100.0) - usual_s < 1.0
