from __future__ import annotations

import contextlib
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import MemoryLimitError, OptionsError
from tf_ooo.planning.building.joint import calculated_gains, fill, step_s
from tf_ooo.planning.building.regions import MainStream, own, read, schedule, write
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.simulation.simulator import simulate, validate
from tf_ooo.rewriting.plan import plan

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
HALF = (0.5, 0.5, 0.5)


def layer(forward_s, output_grad_s, weight_grad_s, **more):
    return LayerCosts(forward_s, output_grad_s, weight_grad_s, **more)


def period_s(made, layers):
    return simulate(made, layers, steps=8).steady_step_s


def planned(layers, policy="multi_stream", **options):
    return plan(layers=layers, schedule=policy, mode="single_device", **options)


THREE = [layer(2, 3, 4), layer(3, 2, 5), layer(1, 4, 6)]


def placed(layers, texts):
    return planned(layers, placement=texts)


def test_own_regions_by_hand():
    # Main: F 6, dO2 10, dO1 12, dO0 15, dW0 19.  Sub: dW2 10-16, dW1 16-21.  F1 of the next step waits
    # for dW1: F0 19-21, F1 21-24, F2 25: a step every 19 s, the main stream is never idle.
    assert period_s(placed(THREE, {2: "BWD 2", 1: "BWD 1"}), THREE) == 19
    # All on the main stream: 6 + 9 + 15.
    assert period_s(placed(THREE, {}), THREE) == 30


def test_next_forward_by_hand():
    # dW2 beside F0 of the next step: main F 6, dO2 10, dO1 12, dO0 15, dW0 19, F0 19-21, F1 21-24.
    # Sub: dW1 12-17; dW2 begins when dO0 is done, after dW1: 17-23.  F2 at 24: again 19 s.
    made = placed(THREE, {2: "FWD 0", 1: "BWD 1"})
    assert period_s(made, THREE) == 19
    # Beside F1 it begins when F0 is done, at 21, and ends at 27: F2 waits 3 s.
    late = placed(THREE, {2: "FWD 1", 1: "BWD 1"})
    assert late.after[-1] == (Task("dW", 2), Task("F", 0), 1)
    assert period_s(late, THREE) == 22


def test_shared_device_by_hand():
    """Two kernels that need the whole device gain nothing side by side; two halves do not disturb."""
    full = [layer(2, 2, 2, occupancy=(1, 1, 1)), layer(2, 2, 2, occupancy=(1, 1, 1))]
    assert planned(full).lanes.keys() == {(0, 0)}
    half = [layer(2, 2, 2, occupancy=HALF), layer(2, 2, 2, occupancy=HALF)]
    # Main: F 4, dO 8, dW0 10; dW1 runs beside dO0.
    assert planned(half).predicted_step_s == 10


def test_greedy_takes_the_region_that_gains_most():
    # dO0 fills the device, the next step's F0 a tenth of it: dW1 goes there.
    layers = [layer(4, 4, 1, occupancy=(0.1, 1, 1)), layer(1, 1, 4, occupancy=(1, 1, 0.9))]
    made = planned(layers)
    assert made.after == ((Task("dW", 1), Task("dO", 0), 0),)
    # Main: 1 + 4 + 1 + 4 + 1; dW1 beside dW0 for 1 s of work (together 1.9 s), and then beside F0.
    assert made.predicted_step_s == pytest.approx(11.9)


def test_gains_table_decides():
    """The table says dW2 gains beside the next step's F1 and nowhere else, whatever occupancy says."""
    layers = [layer(5, 3, 1), layer(5, 3, 1), layer(5, 3, 2)]
    made = planned(layers, gains={("F:1", 2): 2.0, ("dO:0", 1): 1.0})
    assert made.after == ((Task("dW", 2), Task("F", 0), 1),)
    assert list(map(str, made.lanes[0, 1])) == ["dW:1", "U:1", "dW:2", "U:2"]


def test_without_a_next_step_dw_ends_with_the_backward_pass():
    # It is as before, but nothing may run beside the next F0, where alone dW1 would gain.
    layers = [layer(4, 4, 1, occupancy=(0.1, 1, 1)), layer(1, 1, 4, occupancy=(1, 1, 1))]
    assert planned(layers, delay=False).lanes.keys() == {(0, 0)}
    assert calculated_gains(Problem(tuple(layers))).keys() == {("F:0", 1)}
    assert not calculated_gains(Problem(tuple(layers), options={"delay": False}))
    # A table that knows more does not change that: the second best place is taken.
    table = {("F:1", 2): 9.0, ("dO:0", 2): 2.0, ("dO:1", 2): -1.0}
    assert fill(Problem(tuple(THREE), options={"gains": table}))[2].kind == "F"
    assert fill(Problem(tuple(THREE), options={"gains": table, "delay": False}))[2] == Task("dO", 0)


def test_a_step_without_a_next_one_ends_with_its_last_task():
    # Main: F 6, dO2 10, dO1 12, dO0 15, dW0 19; dW2 10-16, dW1 16-21 on the other stream.
    placement = {2: own(2), 1: own(1)}
    assert step_s(Problem(tuple(THREE), options={"delay": False}), placement) == 21
    assert step_s(Problem(tuple(THREE)), placement) == 19


def test_memory_limit_brings_dw_back():
    layers = [
        layer(2, 2, 2, activation_bytes=8, weight_bytes=100 * (number == 0), occupancy=(0.1, 1, 0.5))
        for number in range(6)
    ]
    free = planned(layers)
    assert any(task.kind == "dW" for task in free.lanes[0, 1])
    stock = plan(layers=layers, schedule="in_order", mode="single_device").predicted_peak_bytes
    assert free.predicted_peak_bytes > stock
    for limit in range(stock, free.predicted_peak_bytes, 9):
        for policy in ("multi_stream", "search"):
            assert planned(layers, policy, memory_limit_bytes=limit).predicted_peak_bytes <= limit
    with pytest.raises(MemoryLimitError) as error:
        planned(layers, memory_limit_bytes=stock - 1)
    assert error.value.smallest_bytes == stock


def test_golden():
    text = placed(THREE, {2: "FWD 1", 1: "BWD 1"}).to_text()
    assert text == (GOLDEN / "multi_stream.txt").read_text()
    assert Schedule.from_text(text).to_text() == text


@pytest.mark.parametrize(
    ("options", "message"),
    [({"placement": {1: "BWD 2"}}, "after its dO"), ({"placement": {1: "FWD 1"}}, "next forward"),
     ({"placement": {5: "NO"}}, r"placement\[5\]"), ({"placement": {1: "later"}}, "'BWD j'"),
     ({"placement": 3}, "map"), ({"gains": {("dO:9", 1): 1.0}}, "dO:9"), ({"gains": 3}, "map"),
     ({"gains": {("dO:0", 1): float("nan")}}, "finite"), ({"delay": 1}, "delay must be")],
)  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises(OptionsError, match=message):
        planned(THREE, **options)


def test_one_device_only():
    with pytest.raises(OptionsError, match="2 devices"):
        planned(THREE, devices=2)


@st.composite
def networks(draw):
    numbers, shares = st.integers(0, 9), st.floats(0.05, 1)
    shared = draw(st.booleans())
    return [
        LayerCosts(
            draw(numbers), draw(numbers), draw(numbers), draw(st.integers(0, 2)),
            activation_bytes=draw(numbers), weight_bytes=draw(numbers),
            occupancy=(draw(shares), draw(shares), draw(shares)) if shared else None,
        )
        for _ in range(draw(st.integers(1, 6)))
    ]  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(networks(), st.none() | st.integers(5, 120))
def test_valid_never_worse_and_within_memory(layers, limit):
    stock_s = sum(c.forward_s + c.output_grad_s + c.weight_grad_s + c.update_s for c in layers)
    for policy, options in (("multi_stream", {}), ("search", {"evaluations": 10})):
        with contextlib.suppress(MemoryLimitError):
            made = planned(layers, policy, memory_limit_bytes=limit, **options)
            validate(made, layers)
            assert len(set(made.tasks)) == 4 * len(layers)
            assert made.predicted_step_s <= stock_s * (1 + 1e-6) + 1e-9
            peak = max(simulate(made, layers, steps=5 + made.steps_ahead).peak_bytes)
            assert limit is None or peak <= limit


@settings(deadline=None, max_examples=60)
@given(networks(), st.randoms(use_true_random=False))
def test_any_placement_runs_and_is_written_as_it_is_read(layers, draw):
    stream = MainStream(len(layers))
    placement = {0: None}
    for number in range(1, len(layers)):
        anywhere = stream.regions[draw.choice(stream.allowed(number))]
        placement[number] = draw.choice([None, own(number), anywhere])
    assert read(write(placement), len(layers)) == placement
    made = schedule("multi_stream", Problem(tuple(layers)), placement)
    validate(made, layers)
    simulate(made, layers, steps=4)
    assert Schedule.from_text(made.to_text()) == made
