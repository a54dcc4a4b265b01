"""Steps over several devices last until their outputs are there, by a clock that only waiting moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tf_ooo.compat import nests
from tf_ooo.fit import timing
from tf_ooo.modes.layerpipe import ticks as layerpipe
from tf_ooo.modes.pipeline import steps as pipeline
from tf_ooo.report.report import Report


@pytest.fixture
def takes_s(monkeypatch):
    """Outputs that are waited for so long; without waiting no time passes."""
    clock = SimpleNamespace(now_s=0.0)

    def wait(outputs):
        clock.now_s += outputs

    monkeypatch.setattr(nests, "synchronize", wait)
    for module in (layerpipe, timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))


class Functions:
    """The step of a pipeline; a batch says how long its outputs are waited for, and whether it is traced."""

    traced = 0

    def __call__(self, batch):
        seconds, traces = batch
        self.traced += traces
        return seconds


class Request:
    """Rewrites each trace of the functions."""

    failures = SimpleNamespace(raise_first=lambda: None)
    result = SimpleNamespace(moved_ops=0, added_edges=0, graph_def=None, notes=("rewritten",), compiled=None)

    def __init__(self, functions):
        self._functions = functions

    @property
    def count(self):
        return self._functions.traced


def test_steps_of_a_pipeline(takes_s):
    """One in which a function was traced is no sample."""
    running = pipeline.Cut.__new__(pipeline.Cut)
    running._before, running._report = {}, Report()
    running._step = SimpleNamespace(functions=Functions(), said_in_report=None)
    running._step.request = Request(running._step.functions)
    running._pipeline = SimpleNamespace(step_s=[], plan=SimpleNamespace(compile_tasks=False))
    assert [running.cut_step(batch) for batch in ((9.0, True), (2.0, False), (3.0, False))] == [9.0, 2.0, 3.0]
    assert running._pipeline.step_s == [2.0, 3.0]
    assert running._report.notes == ["rewritten"]


def test_rounds_of_layerpipe(takes_s):
    """The seconds of a step are the mean of its rounds, once; what is under way still has no outputs."""
    ticks, step_s = SimpleNamespace(traced_functions=0), []
    epoch = layerpipe.Epoch(ticks, lambda: None)

    def step_of(rounds, seconds, traced=0):
        def step():
            epoch.rounds += rounds
            ticks.traced_functions += traced
            return seconds

        return step

    for epoch.step in (
        step_of(4, 20.0, traced=1),
        step_of(2, 6.0),
        step_of(1, 5.0),
        step_of(1, None),
        step_of(0, 1.0),
    ):
        epoch.timed_step(step_s)
    assert step_s == [3.0, 5.0, 0.0]
