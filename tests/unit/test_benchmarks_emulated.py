"""Emulated devices: what layers take, PyTorch's orders, and what is read from the log of waits."""

from __future__ import annotations

import numpy as np
import pytest

import tf_ooo
from benchmarks import torch_orders
from benchmarks.cases import cases_of
from benchmarks.emulated.costs import costs_of
from benchmarks.emulated.observed import Observed
from tf_ooo.demo.waits import RECORD
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList


def lane(text):
    return TaskList(Task.parse(word) for word in text.split())


def name_of(task):
    return f"{task.kind}:{task.stage}@{task.microbatch}"


def text_of(schedule, device):
    return " ".join(name_of(task) for task in schedule.lanes[device, 0] if task.kind != "U")


def test_torchs_interleaved_zero_bubble():
    """Worked out by hand from torch's loop for rank 1 of 2, two stages each, two micro-batches."""
    order = torch_orders.interleaved_zero_bubble(2, 2, 2)
    assert text_of(order, 1) == (
        "F:1@0 F:1@1 F:3@0 dO:3@0 F:3@1 dO:3@1 dW:3@0 dO:1@0 dW:3@1 dO:1@1 dW:1@0 dW:1@1"
    )
    with pytest.raises(ValueError, match="9 micro-batches"):
        torch_orders.interleaved_zero_bubble(2, 9, 2)


def test_torchs_zbv():
    """Worked out by hand from torch's phases for rank 1 of 2, four micro-batches."""
    assert text_of(torch_orders.zbv(2, 4), 1) == (
        "F:1@0 F:2@0 F:1@1 F:2@1 dO:2@0 dW:2@0 F:1@2 dO:1@0 dW:1@0 F:2@2 dO:2@1 dW:2@1 "
        "F:1@3 dO:1@1 dW:1@1 F:2@3 dO:2@2 dW:2@2 dO:1@2 dO:2@3 dO:1@3 dW:1@2 dW:2@3 dW:1@3"
    )


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("rounds", [1, 2])
def test_torchs_orders_run(devices, rounds):
    """With F = dO = dW = 1 both have the published bubble, p - 1, where p or 2p micro-batches fill them."""
    count = rounds * devices
    layers = [tf_ooo.LayerCosts(1.0, 1.0, 1.0)] * (2 * devices)
    orders = [torch_orders.interleaved_zero_bubble(devices, count, 2)]
    if rounds > 1:
        orders.append(torch_orders.zbv(devices, count))
    for order in orders:
        assert tf_ooo.simulate(order, layers).makespan_s == 6 * count + devices - 1


@pytest.mark.parametrize("devices", [4, 8, 12])
def test_ours_is_no_slower_than_torchs_fixed_order(devices):
    """Equal layers leave a search little to find, and with short messages it missed this order."""
    layers, link = [tf_ooo.LayerCosts(1.0, 1.0, 1.0)] * (2 * devices), tf_ooo.Link(0.012)
    ours = tf_ooo.plan(
        layers=layers, schedule="zb_interleaved", devices=devices, microbatches=devices, link=link
    )
    torchs = torch_orders.interleaved_zero_bubble(devices, devices, 2)
    ours_s, torchs_s = (tf_ooo.simulate(order, layers, link).makespan_s for order in (ours, torchs))
    assert ours_s <= torchs_s


def test_seconds_of_the_models():
    equal = costs_of("equal", 8, 4, 0.005, 1e-3).layers
    assert sum(layer.forward_s for layer in equal) == pytest.approx(4 * 0.005)
    assert {layer.forward_s for layer in equal[1:]} == {equal[0].forward_s}
    assert equal[0].output_grad_s == 0.0
    gpt = costs_of("gpt", 8, 4, 0.005, 1e-3).layers
    assert gpt[-1].forward_s == pytest.approx(2.5 * gpt[1].forward_s)
    gpt2 = costs_of("gpt2", 25, 8, None, 1e-3).layers
    # 2 x 8192 tokens x 1024 x 50257 operations in the output matrix; its bytes take a little more.
    product_s = 2 * 8192 * 1024 * 50257 / (0.44 * 312e12)
    assert product_s < gpt2[-1].forward_s < 1.2 * product_s
    assert 3 < gpt2[-1].forward_s / gpt2[0].forward_s < 4


def records(*rows):
    return np.array([(start, start, end, device, name) for name, device, start, end in rows], RECORD)


def two_devices(**changes):
    lanes = {(0, 0): lane("F:0@0 F:0@1 dO:0@0 dW:0@0"), (1, 0): lane("F:1@0 dO:1@0 dW:1@0")}
    return Schedule("pipeline", "by_hand", lanes, microbatches=2, **changes)


def observed(log, **changes):
    schedule = two_devices(**changes)
    seen = Observed(schedule, {name_of(task): task for task in schedule.tasks})
    seen.add(6.0, log)
    return seen


def test_gaps_are_of_tasks_of_messages_or_of_the_step():
    log = records(
        ("F:0@0", "a", 1.0, 2.0), ("F:0@1", "a", 2.125, 3.0), ("F:1@0", "b", 2.25, 3.0),
        ("dO:1@0", "b", 3.5, 4.0), ("dO:0@0", "a", 5.0, 6.0),
    )  # fmt: skip
    seen = observed(log)
    assert {kind: sorted(gaps_s) for kind, gaps_s in seen.gaps_s.items()} == {
        "task": [0.125, 0.5],
        "message": [0.25, 1.0],
        "step": [1.0],
    }
    assert (seen.violations, seen.pairs) == (0, 3)
    assert seen.to_dict()["per_message_us"][0] == 625_000.0


@pytest.mark.parametrize(
    ("changed", "violations"),
    [
        (("F:0@1", "a", 1.5, 3.0), 1),  # before the one in front of it has ended
        (("F:0@1", "b", 2.0, 3.0), 1),  # on the other device
        (("unknown", "a", 2.0, 3.0), 1),
        (("F:0@1", "a", 2.0, 3.0), 0),
    ],
)
def test_violations(changed, violations):
    log = records(("F:0@0", "a", 1.0, 2.0), changed, ("F:1@0", "b", 2.0, 3.0))
    assert observed(log).violations == violations


def test_a_fused_backward_pass_is_one_task():
    log = records(
        ("F:0@0", "a", 1.0, 2.0), ("F:1@0", "b", 2.0, 3.0), ("dW:1@0", "b", 3.0, 4.0),
        ("dO:1@0", "b", 4.0, 5.0), ("dO:0@0", "a", 5.5, 6.0),
    )  # fmt: skip
    seen = observed(log, fused_backward=True)
    assert seen.violations == 0
    assert sorted(seen.gaps_s["message"]) == [0.0, 0.5]


def test_cases():
    assert len(cases_of("emulated", quick=False)) >= 12
    assert 3 <= len(cases_of("emulated", quick=True)) <= 4
