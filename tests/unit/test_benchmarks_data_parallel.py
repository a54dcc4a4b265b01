"""Data parallel benchmarks: jobs for settings of Horovod, and what weights are compared with."""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases import NOBODY, OURS, WayRun, cases_of
from benchmarks.models import check_sum
from benchmarks.processes import BenchmarkError, Job
from benchmarks.runners import horovod


@pytest.mark.parametrize("quick", [True, False])
def test_cases(quick):
    for case in cases_of("data_parallel", quick):
        kinds = {way.name: way.options["kind"] for way in case.ways}
        assert next(iter(kinds)) == "horovod"
        assert {way.name for way in case.ways if way.had_by == OURS} == {"auto"}
        assert {way.name for way in case.ways if way.had_by == NOBODY} == {"local", "reverse_first_k k=0"}
        json.dumps([way.options for way in case.ways])


def test_each_setting_of_horovod_has_a_job_of_its_own():
    case = cases_of("data_parallel", False)[0]
    jobs = [[way.name for way in ways] for ways in horovod.jobs_of(case).values()]
    assert ["horovod", "horovod_k", "horovod_tape_k", "reverse_first_k k=0", "auto", "local"] in jobs
    assert ["multi_worker_k"] in jobs
    assert sum(len(ways) == 1 and "horovod_k, " in ways[0] for ways in jobs) == 3


def test_the_link_on_which_communicating_takes_as_long_as_computing():
    # Two ranks send 8 Mbit twice in one second.
    assert horovod.bandwidth_mbit(1.0, gradient_bytes=1_000_000, compute_s=1.0) == 16.0
    assert horovod.bandwidth_mbit(0.5, gradient_bytes=1_000_000, compute_s=1.0) == 32.0


def test_weights_are_compared_with_those_of_stock_horovod():
    case = cases_of("data_parallel", True)[0]
    names = [way.name for way in case.ways]
    ends = {name: ([np.ones(2)], WayRun([])) for name in names}
    ends["auto"] = [np.full(2, 2.0)], WayRun([], 0.5)
    measured = horovod.measured(case, dict.fromkeys(names, [1.0]), ends, {})
    assert measured.stock_bits == check_sum([np.ones(2)])
    assert (measured.ways["horovod"].bits, measured.ways["local"].bits) == (None, None)
    assert measured.ways["horovod_k"].bits == measured.stock_bits
    assert measured.ways["horovod_k"].largest_difference == 0
    auto = measured.ways["auto"]
    assert auto.bits == check_sum([np.full(2, 2.0)])
    assert (auto.largest_difference, auto.predicted_s) == (1.0, 0.5)


def _state(process: int) -> str:
    """Return Linux' letter for what a process does."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def job(tmp_path):
    """A job of one rank, a Python that sleeps and whose answers this test writes."""
    sleeps = [sys.executable, "-c", "import time; print('it printed this', flush=True); time.sleep(100)"]
    sleeping = Job([sleeps], {}, tmp_path / "job", ranks=1, stops=True)
    while not (tmp_path / "job.log").read_text():
        time.sleep(0.01)
    with Client(str(tmp_path / "job"), "AF_UNIX") as rank:
        rank.send((0, sleeping.launchers[0].pid))
        sleeping.connect()
        yield sleeping, rank
    sleeping.end()
    assert sleeping.launchers[0].poll() is not None


def test_a_rank_is_stopped_while_it_is_not_asked_anything(job):
    asked, rank = job
    rank.send(0.25)
    assert asked.ask("turn", "auto") == 0.25
    assert rank.recv() == ("turn", "auto")
    deadline_s = time.monotonic() + 20
    while _state(asked.ranks[0][1]) != "T" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert _state(asked.ranks[0][1]) == "T"


def test_what_a_rank_printed_is_said_where_it_fails(job):
    asked, rank = job
    rank.close()
    with pytest.raises(BenchmarkError, match=r"a rank failed with turn auto:\nit printed this"):
        asked.ask("turn", "auto")
