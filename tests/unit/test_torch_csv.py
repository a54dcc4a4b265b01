"""Schedules as CSV files for torch.distributed.pipelining; torch itself is not needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_ooo
from tf_ooo.cli import main
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OOOError, ScheduleError
from tf_ooo.planning.choosing.plan import as_asked, policy_named
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES

PIPELINES = [name for name, policy in POLICIES.items() if "pipeline" in policy.modes]
# The pattern of torch 2.14's _Action.from_str, for what a file may hold without messages.
ACTION = re.compile(r"(\d+)(F|I|B|W)(\d+)")
KINDS = {"F": ["F"], "I": ["dO"], "W": ["dW"], "B": ["dO", "dW"]}

TWO = """tf_ooo schedule v1
mode pipeline
policy mine
microbatches 2
"""
FUSED = TWO.replace("policy mine", "policy mine\nfused_backward yes")
LANES = """lane 0 0: F:0@0 F:0@1 dO:0@0 dW:0@0 dO:0@1 dW:0@1 U:0@0
lane 1 0: F:1@0 dO:1@0 dW:1@0 F:1@1 dO:1@1 dW:1@1 U:1@0
"""


def rows_of(text):
    """Return (stage, letter, micro-batch) of each row, as torch reads them."""
    assert text.endswith("\n")
    matches = [[ACTION.fullmatch(action) for action in line.split(",")] for line in text.splitlines()]
    return [[(int(of[1]), of[2], int(of[3])) for of in row] for row in matches]


def test_a_gradient_is_not_held_back_by_its_dw():
    """Rank 0 waits for dO:1, so that it stays alone; nobody waits for dO:0."""
    assert Schedule.from_text(TWO + LANES).to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


def test_a_fused_schedule_has_whole_backward_passes():
    assert Schedule.from_text(FUSED + LANES).to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_what_stands_between_keeps_both_apart():
    lanes = LANES.replace("dW:0@0 dO:0@1", "dO:0@1 dW:0@0")
    assert Schedule.from_text(FUSED + lanes).to_torch_csv().startswith("0F0,0F1,0I0,0I1,0W0,0W1\n")


def test_a_single_backward_task_is_the_whole_pass():
    """The first stage may have no dO, and one without weights no dW."""
    lanes = LANES.replace("dO:0@0 ", "").replace("dO:0@1 ", "").replace(" dW:1@0", "").replace(" dW:1@1", "")
    assert Schedule.from_text(TWO + lanes).to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_stage_before_on_the_same_rank_waits_for_nothing():
    """A V's turning point: stage 2 follows stage 1 on rank 1."""
    text = "tf_ooo schedule v1\nmode pipeline\npolicy v\n"
    text += "lane 0 0: F:0 F:3 dO:3 dW:3 dO:0 dW:0 U:0 U:3\nlane 1 0: F:1 F:2 dO:2 dW:2 dO:1 dW:1 U:1 U:2\n"
    assert Schedule.from_text(text).to_torch_csv() == "0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1I0,1W0\n"


def test_stages_and_micro_batches_of_two_digits_are_not_mixed_up():
    text = "tf_ooo schedule v1\nmode pipeline\npolicy many\nfused_backward yes\nmicrobatches 12\n"
    for rank in (0, 1):
        tasks = [f"{kind}:{rank}@{m}" for m in range(12) for kind in ("F", "dO", "dW")]
        text += f"lane {rank} 0: {' '.join(tasks)} U:{rank}\n"
    for row in rows_of(Schedule.from_text(text).to_torch_csv()):
        assert [(letter, m) for _, letter, m in row] == [(letter, m) for m in range(12) for letter in "FB"]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(PIPELINES), devices=st.integers(2, 4), microbatches=st.integers(1, 6), data=st.data()
)
def test_each_task_is_one_action_of_its_rank(name, devices, microbatches, data):
    seconds = st.integers(1, 9).map(float)
    layers = data.draw(st.lists(st.tuples(seconds, seconds, seconds), min_size=2 * devices, max_size=12))
    problem = Problem(tuple(LayerCosts(*of) for of in layers), devices, microbatches, mode="pipeline")
    try:
        schedule = as_asked(policy_named(name, "pipeline"), problem).schedule
    except OOOError:
        return  # this policy does not take the problem
    rows = rows_of(schedule.to_torch_csv())
    assert len(rows) == devices
    for rank, row in enumerate(rows):
        tasks = [task for task in schedule.lanes[rank, 0] if task.kind != "U"]
        written = [(kind, stage, m) for stage, letter, m in row for kind in KINDS[letter]]
        if not schedule.fused_backward:
            assert written == [(task.kind, task.stage, task.microbatch) for task in tasks]
        assert Counter(written) == Counter((task.kind, task.stage, task.microbatch) for task in tasks)


def planned(mode, layers=4, **given):
    return tf_ooo.plan(layers=[LayerCosts(1, 1, 1, 1, activation_bytes=8)] * layers, mode=mode, **given)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (planned("layerpipe", devices=2, microbatches=4), ["layerpipe, asynchronous", "--mode pipeline"]),
        (planned("single_device"), ["mode single_device", "several devices"]),
        (planned("data_parallel", devices=2), ["mode data_parallel"]),
        (planned("pipeline", devices=2, microbatches=2, recompute="all"), ["0, 1, 2, 3", "checkpoint"]),
        (planned(None, devices=4, microbatches=4, splits=True, schedule="auto", layers=2), ["of 2 replicas"]),
        (TWO + LANES.replace(" dO:1@1 dW:1@1", ""), ["F:1@1 or its backward is missing"]),
        (TWO + LANES + "lane 2 0:\n", ["device 2 has no stage"]),
        (TWO + LANES.replace(" dW:0@1", "") + "lane 0 1: dW:0@1\n", ["lanes", "(0, 1)"]),
        (TWO + LANES.replace(" dW:0@1", "").replace("U:1", "dW:0@1 U:1"), ["dW:0@1 is on device 1"]),
        (TWO + LANES.replace("@0", "@x").replace("@1", "@0").replace("@x", "@1"), ["order [1, 0]"]),
        (TWO + "after dW:0@0: dO:1@1\n" + LANES, ["'after'"]),
        (TWO + LANES.replace("lane 1 0", "lane 1 0 priority"), ["'priority'"]),
    ],
)  # fmt: skip
def test_what_torch_cannot_run_is_refused(schedule, words):
    schedule = Schedule.from_text(schedule) if isinstance(schedule, str) else schedule
    with pytest.raises(ScheduleError) as error:
        schedule.to_torch_csv()
    assert all(word in str(error.value) for word in [schedule.policy, *words])


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def seconds(tmp_path):
    """A file that has nothing but seconds of stages."""
    path = tmp_path / "seconds.json"
    stages = [
        {"forward_s": 1, "output_grad_s": 1, "weight_grad_s": 1, "name": f"block {i}"} for i in range(4)
    ]
    path.write_text(json.dumps(stages))
    return path


def test_the_command_writes_the_file(seconds, tmp_path):
    csv, out = tmp_path / "plan.csv", tmp_path / "plan.txt"
    ask = ("plan", seconds, "--devices", 2, "--microbatches", 4, "--schedule", "1f1b")
    result = run(*ask, "--torch-csv", csv, "--out", out)
    assert result.exit_code == 0, result.output
    assert csv.read_text() == Schedule.from_text(out.read_text()).to_torch_csv()
    assert csv.read_text().splitlines()[1] == "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"
    assert "stage 1 on rank 1: block 2 to block 3" in result.output
    assert "rank" not in run(*ask).output


def test_the_command_refuses_what_torch_cannot_run(seconds, tmp_path):
    csv = tmp_path / "plan.csv"
    result = run("plan", seconds, "--torch-csv", csv)
    assert result.exit_code == 2
    assert "several devices" in result.stderr
    assert "no files" in run("plan", seconds, "--devices", 2, "--splits", "--torch-csv", csv).stderr
    assert not csv.exists()


def test_seconds_that_are_wrong_are_named(seconds):
    seconds.write_text(seconds.read_text().replace('"forward_s": 1', '"forward_s": -1', 1))
    assert "layer 0 (block 0): forward_s: must be" in run("plan", seconds).stderr
    seconds.write_text('[{"forward_s": 1, "output_grad_s": 1}]')
    assert "layer 0: weight_grad_s is missing" in run("plan", seconds).stderr
    seconds.write_text("[3]")
    assert "layer 0: expected an object" in run("plan", seconds).stderr


def test_neither_tensorflow_nor_torch_is_imported(seconds, tmp_path):
    arguments = ["plan", str(seconds), "--devices", "2", "--torch-csv", str(tmp_path / "plan.csv")]
    code = f"""
import sys
from tf_ooo.cli import main
main({arguments!r}, standalone_mode=False)
sys.exit(", ".join({{"tensorflow", "torch"}} & sys.modules.keys()) or None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
