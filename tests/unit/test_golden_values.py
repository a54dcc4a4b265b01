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


def words(tasks):
    return " ".join(map(str, tasks))


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("pipeline_gpipe", [M, M, M]),
        ("pipeline_1f1b", [3, 2, 1]),
        ("pipeline_fast_forward", [3, 2, 1]),
        ("pipeline_zb_h1", [3, 2, 1]),
        ("pipeline_zb_h2", [5, 3, 1]),
        ("pipedream", [3, 2, 1]),
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


@pytest.mark.parametrize("name", ["data_parallel_in_order", "data_parallel_reverse_first_k"])
def test_data_parallel_by_hand(name):
    """dW2 ends at 7, dW1 at 11, dW0 at 16; link 7-12, 12-18, 18-22; U0 22-22.5, forward 7 more."""
    assert golden(name).predicted_step_s == 22.5 + 7


def test_data_parallel_search_gains_by_slices():
    """The link, idle until dW2 ends at 7, then is busy for 15 bytes, 1 s each: the last two are of layer 1.

    Layer 2 goes 7-12, two of three slices of layer 1 12-16, layer 0 when its dW ends, 16-20, what is left of
    layer 1 20-22.  U0 20-20.5, F0 until 21.5; U1 22-22.5, F1 until 24.5, F2 until 28.5.
    """
    schedule = golden("data_parallel_search")
    assert words(schedule.lanes[0, 0]) == "F:0 F:1 F:2 dO:2 dW:2 dO:1 dW:1 dO:0 dW:0"
    sent = [(task.stage, task.part) for task in schedule.lanes[0, 1]]
    assert sent == [(2, 0), (2, 1), (2, 2), (1, 0), (1, 1), (0, 0), (0, 1), (1, 2)]
    parts = {layer: schedule.parts["comm", layer] for layer in range(3)}
    assert parts == {0: (1 / 2,) * 2, 1: (1 / 3,) * 3, 2: (1 / 3,) * 3}
    assert schedule.predicted_step_s == pytest.approx(22.5 + 2 + 4)


def test_multi_stream_by_hand():
    """dW2 is to run beside the next step's F1.

    Main: F 6, dO2 10, dO1 12, dO0 15, dW0 19; F0 19-21, F1 21-24.  On the other stream dW1 12-17 and, when F0
    is done, dW2 21-27: F2 ends at 28 and not at 25, 22 s after the one before.
    """
    schedule = golden("multi_stream")
    assert {lane: words(tasks) for lane, tasks in schedule.lanes.items()} == {
        (0, 0): "F:0 F:1 F:2 dO:2 dO:1 dO:0 dW:0 U:0",
        (0, 1): "dW:1 U:1 dW:2 U:2",
    }
    assert list(schedule.after) == [(Task("dW", 2), Task("F", 0), 1)]
    assert schedule.predicted_step_s == 28 - 6
