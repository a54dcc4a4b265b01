"""The golden files against what the papers draw; see tests/golden/README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf_ooo.planning.model.schedule import Schedule, Task

GOLDEN = Path(__file__).parents[1] / "golden"
# Micro-batches, on three stages.
M = 5


def golden(name):
    return Schedule.from_text((GOLDEN / f"{name}.txt").read_text())


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("pipeline_gpipe", [M, M, M]),
        ("pipeline_1f1b", [3, 2, 1]),
        ("pipeline_fast_forward", [3, 2, 1]),
        ("pipeline_zb_h1", [3, 2, 1]),
        ("pipeline_zb_h2", [5, 3, 1]),
        ("pipedream", [3, 2, 1]),
        ("pipedream_2bw", [3, 2, 1]),
    ],
)
def test_forward_passes_before_the_first_backward(name, ahead):
    """p - s on stage s; 2(p - s) - 1 in ZB-H2."""
    lanes = golden(name).lanes
    for device, count in enumerate(ahead):
        kinds = [task.kind for task in lanes[device, 0]]
        assert kinds[: count + 1] == ["F"] * count + ["dO"]


def test_1f1b_alternates():
    """The last stage has one micro-batch in flight: F, dO, dW of each in turn, then the update."""
    turns = [Task(kind, 2, m) for m in range(M) for kind in ("F", "dO", "dW")]
    assert list(golden("pipeline_1f1b").lanes[2, 0]) == [*turns, Task("U", 2)]


def test_pipedream_2bw_writes_after_every_third_micro_batch():
    updates = [task.microbatch for task in golden("pipedream_2bw").lanes[0, 0] if task.kind == "U"]
    assert updates == [2, 4]


@pytest.mark.parametrize("name", ["data_parallel_in_order", "data_parallel_reverse_first_k"])
def test_data_parallel_by_hand(name):
    """dW2 ends at 7, dW1 at 11, dW0 at 16; link 7-12, 12-18, 18-22; U0 22-22.5, forward 7 more."""
    assert golden(name).predicted_step_s == 22.5 + 7


def test_data_parallel_search_gains_by_slices():
    schedule = golden("data_parallel_search")
    assert schedule.predicted_step_s < golden("data_parallel_in_order").predicted_step_s
    # What nothing can go below: the forward pass, backward to the first dW, and all messages.
    assert schedule.predicted_step_s > 7 + 7
