"""Cases of benchmarks on one CPU, and of a model on workers with limits of memory."""

from __future__ import annotations

import pytest

from benchmarks.cases import OURS, cases_of
from benchmarks.machine import groups
from benchmarks.runners import limited_memory


@pytest.mark.parametrize(("suite", "ours"), [("one_cpu", "auto"), ("any_size", "auto")])
@pytest.mark.parametrize("quick", [True, False])
def test_auto_alone_is_ours(suite, ours, quick):
    for case in cases_of(suite, quick):
        assert [way.name for way in case.ways if way.had_by == OURS] == [ours]


def test_ten_networks():
    assert len(cases_of("one_cpu", False)) == 10


def test_any_size_is_skipped_without_groups(monkeypatch):
    monkeypatch.setattr(groups.os, "geteuid", lambda: 1000)
    (case,) = cases_of("any_size", True)
    assert limited_memory.why_not(case) == "needs root for memory groups"


def test_any_size_is_about_twice_what_a_worker_may_use():
    (case,) = cases_of("any_size", False)
    layers, width = case.parameters["layers"], case.parameters["width"]
    needed_bytes = 4 * 3 * 12 * layers * width**2  # Adam has two numbers for each weight
    assert 1.9 < needed_bytes / (case.parameters["limit_mb"] * 1e6) < 2.2
