"""The command line of the benches, and what they tell the processes that they start."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from tf_ooo.bench.data_parallel.rows import as_if_in_turns, bandwidth_mbit
from tf_ooo.bench.pipeline.command import pipeline
from tf_ooo.bench.pipeline.rows import FUSED
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.options import repeated
from tf_ooo.bench.shared.processes import command, requests
from tf_ooo.bench.single.cases import AskedWays, Case
from tf_ooo.bench.single.command import single
from tf_ooo.cli import main
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import POLICIES

NO_TENSORFLOW = """
import sys
import click
from tf_ooo.cli import main

def show(command, *names):
    print(*names)
    main([*names, "--help"], standalone_mode=False)
    for name, below in getattr(command, "commands", {}).items():
        show(below, *names, name)

show(main.commands["bench"], "bench")
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
"""


def invoked(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_help_of_all_commands_needs_no_tensorflow():
    run = subprocess.run([sys.executable, "-c", NO_TENSORFLOW], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "bench report\n" in run.stdout
    assert run.stdout.count("Usage: ") == 13


def test_the_gpu_list_under_its_old_name():
    command = [sys.executable, "-m", "tf_ooo.bench.gpu_day", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--command INTEGER RANGE" in run.stdout


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--devices 2 3 --json f", "--devices 2 --devices 3 --json f"),
        ("--quick --devices 2", "--quick --devices 2"),
        ("--devices 2 --quick --devices 3 4", "--devices 2 --quick --devices 3 --devices 4"),
        ("--json f g", "--json f g"),
    ],
)
def test_several_values_in_a_row(given, read):
    assert list(repeated(given.split(), {"--devices"})) == read.split()


def test_options_with_several_values():
    line = ["--ways", "xla", "joint, measured gains", "--batches", "8", "16", "--quick", "--data", "real"]
    given = single.make_context("single", line).params
    assert given["ways"] == ("xla", "joint, measured gains")
    assert given["batches"] == (8, 16)
    assert given["data"] == ("real",)
    assert given["networks"] == ()
    assert given["quick"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["layerpipe", "--seeds", "3"], "--seeds is for --accuracy"),
        (["layerpipe", "--accuracy", "--workload", "mlp"], "--workload does not go with --accuracy"),
        (["layerpipe", "--simulated", "--devices", "4"], "--devices does not go with --simulated"),
        (["data-parallel", "--mbit", "fast"], "expected numbers with commas, or none"),
        (["data-parallel", "--mbit", "-1"], "none of them below 0"),
        (["data-parallel", "--mbit", "100,nan"], "none of them below 0"),
        (
            ["data-parallel", "--configurations", "local,fast"],
            "'fast' is no configuration; there are horovod,",
        ),
        (["data-parallel", "--mbit", "100", "--communication", "1"], "give one of them"),
        (["data-parallel", "--workers", "0"], "0 is not in the range"),
        (["data-parallel", "--cores", "nan"], "nan is no number above 0"),
        (["mesh", "--cores", "1.5"], "1.5 is more than 1: a worker computes with one thread"),
        (["single", "--json", "nowhere/rows.json"], "there is no folder nowhere"),
        (["pipeline", "--devices", "2", "0"], "0 is not in the range"),
        (["pipeline", "--schedules", "gpipe,1f1b_unfused"], "'1f1b_unfused' goes only beside '1f1b'"),
        (["pipeline", "--schedules", "gpipe,zb_h9"], "'zb_h9' is no schedule of pipelines; there are auto, "),
        (["layerpipe", "--cores", "-2"], "-2 is no number above 0"),
        (["single", "--rounds", "0"], "0 is not in the range"),
        (["single", "--make-s", "soon"], "soon is no number above 0"),
        (["single-overlap", "--steps", "-1"], "-1 is not in the range"),
        (["gpu-day", "--out", "o", "--minutes", "nan"], "nan is no number above 0"),
        (["single", "--ways", "xla", "nonsense"], "'nonsense' is not one of"),
    ],
)
def test_what_is_refused(options, said):
    result = invoked(*options)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("name", ["data-parallel", "pipeline", "layerpipe", "mesh", "unequal"])
def test_rows_can_be_kept(name, monkeypatch, tmp_path):
    monkeypatch.setattr(confine, "why_not", lambda with_link=True: "not here")
    result = invoked(name, "--quick", "--keep", str(tmp_path))
    assert (result.exit_code, result.output) == (0, "skipped: not here\n")


@pytest.mark.parametrize("line", ["--quick", "--repetitions 5 --quick --devices 3", "--devices 3"])
def test_what_is_given_stays_with_quick(line):
    given = pipeline.make_context("pipeline", line.split()).params
    asked = "--devices" in line
    quick = "--quick" in line
    assert given["devices"] == ((3,) if asked else (2,))
    assert given["repetitions"] == (5 if "--repetitions" in line else 2 if quick else 8)
    assert given["microbatches"] == ((4,) if quick else (8,))
    assert given["schedules"].count(",") == (3 if quick else 11)


def test_a_schedule_without_fusion_comes_behind_the_one_with_it():
    line = ["--schedules", "interleaved_1f1b_unfused,1f1b_unfused,zb_v,1f1b,interleaved_1f1b"]
    assert pipeline.make_context("pipeline", line).params["schedules"] == (
        "zb_v,1f1b,interleaved_1f1b,interleaved_1f1b_unfused,1f1b_unfused"
    )


@pytest.mark.parametrize("name", FUSED)
def test_what_is_unfused_is_fused_by_name(name):
    layers = [LayerCosts(1.0, 1.0, 1.0)] * 8
    problem = Problem(layers=tuple(layers), devices=2, microbatches=4, mode="pipeline")
    assert POLICIES[name].make(problem).fused_backward


def test_what_a_process_is_told(monkeypatch):
    case, ways = Case("lstm-small", 8, "real", 224), AskedWays(["xla", "early"], -5)
    *start, first, second = command("some.module", case, ways)
    assert start == [sys.executable, "-m", "some.module"]
    monkeypatch.setattr(sys, "argv", ["some/module.py", first, second])
    assert requests(Case, AskedWays) == [case, ways]


def test_a_link_on_which_communicating_takes_as_long_as_computing():
    alone = {
        "configurations": {"local": {"seconds": [1.9, 2.0, 2.4]}},
        "gradient_bytes": 25_000_000,
        "workers": 3,
        "communication_s": 0.0,
    }
    assert bandwidth_mbit(alone, 1.0) == 400.0  # 100 MB in two seconds
    assert bandwidth_mbit(alone, 0.5) == 800.0


def test_times_of_tuned_horovod_are_scaled_by_stock_in_processes_of_its_own():
    def run(local_s, step_s):
        return {"configurations": {"local": {"seconds": [local_s]}, "horovod_k": {"seconds": [step_s]}}}

    # Knobs save a quarter of 4 s, the machine being half as fast meanwhile: of the 5 s in turns too.
    scaled = as_if_in_turns(alone=run(2.0, 6.0), shipped=run(1.0, 4.0), together=run(1.5, 5.0))
    assert scaled["seconds"] == [3.75]
