"""``tf-ooo bench prediction``: its workloads, what starts them, rows and what all runs say."""

from __future__ import annotations

import json
import sys

import pytest

from tf_ooo.bench.prediction.cases import CASES, LOGICAL, RANKS, WORKERS
from tf_ooo.bench.prediction.command import command_of
from tf_ooo.bench.prediction.rows import PredictionRun, error_of, summary_of, text_of
from tf_ooo.planning.policies import schedules_of


def test_ten_workloads_of_all_kinds():
    assert len(CASES) == 10
    assert {case.where for case in CASES.values()} == {LOGICAL, WORKERS, RANKS}
    assert len({case.optimizer for case in CASES.values()}) >= 6
    for case in CASES.values():
        mode = "data_parallel" if case.where == RANKS else "pipeline"
        assert case.schedule == "auto" or case.schedule in schedules_of(mode)


def test_the_error_is_of_the_median_step():
    assert error_of(0.9, [0.8, 1.0, 7.0]) == pytest.approx(-0.1)
    assert error_of(1.2, [0.8, 1.0, 1.2]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "begins"),
    [("mlp", ["-m"]), ("unet", ["-m", "tf_ooo", "run"]), ("ranks_cnn", ["-m", "tf_ooo", "run"])],
)
def test_each_fit_has_processes_of_its_own(name, begins):
    """Workers and ranks as a user starts them, and not again where one is lost."""
    python, *line = command_of(PredictionRun(name, 5, 2))
    assert python == sys.executable
    assert line[: len(begins)] == begins
    assert json.loads(line[-1]) == {"case": name, "steps": 5, "repetition": 2}
    if len(begins) > 1:
        kind = "--ranks" if CASES[name].where == RANKS else "--workers"
        assert line[3:7] == ["--max-restarts", "0", kind, "2"]


def run(name, error, **more):
    return {"workload": name, "repetition": 1, "error": error, **more}


def test_every_run_stays_and_misses_are_counted():
    rows = [run("mlp", 0.02), run("cnn", -0.3), run("mlp", 0.16), run("mlp", -0.15)]
    rows.append({"workload": "cnn", "repetition": 2, "failed": "no GPU"})
    rows.append({"workload": "unet", "repetition": 1, "failed": "a worker"})
    assert summary_of(rows) == [
        "mlp          3 runs: -15% / +2% / +16%, 1 of them more than 15% off",
        "cnn          1 runs: -30% / -30% / -30%, 1 of them more than 15% off, 1 failed",
        "unet         1 failed",
        "2 of 6 runs within 15%",
    ]
    assert text_of(rows[4]) == "cnn          run 2  failed: no GPU"
