"""Tests by hand what a schedule keeps out of CUDA graphs, and what joint scheduling makes of it."""

from __future__ import annotations

import pytest

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building import joint
from tf_ooo.planning.building.regions import Capture
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Task
from tf_ooo.rewriting.plan import plan

# Main stream: dO:3 (4 kernels), dO:2 (4), dO:1 (3), dO:0 (6); then F:0 to F:3, two each.
KERNELS = {
    "dO:3": 4, "dO:2": 4, "dO:1": 3, "dO:0": 6, **{f"F:{n}": 2 for n in range(4)},
    "dW:3": 1, "dW:2": 2, "dW:1": 1,
}  # fmt: skip


def dO(layer):  # noqa: N802 - the field's word
    return Task("dO", layer)


def F(layer):  # noqa: N802 - the field's word
    return Task("F", layer)


def lost(placement, **more):
    """Kernels."""
    return Capture(KERNELS, 1.0, **more).lost_s(4, placement)


def test_nothing_is_lost_in_stock_order():
    assert lost({}) == 0
    assert lost({3: None, 2: None}) == 0


def test_a_call_and_short_runs_are_lost():
    # Behind dO:3: its run of 4 is too short, and the 13 that follow are not; the call itself has one kernel.
    assert lost({3: dO(2)}) == 4 + 1
    # Before dO:0: runs of 11 and 6, both long enough.
    assert lost({3: dO(0)}) == 1
    assert lost({3: dO(0)}, own=False) == 0
    assert lost({3: dO(2)}, least_run=4) == 1


def test_runs_that_are_lost_already_cost_nothing_more():
    # Cuts behind dO:3 and behind dO:1: 4 | 7 | 6.  A second call in the same place cuts nothing.
    assert lost({3: dO(2), 2: dO(0)}) == 4 + 1 + 2
    assert lost({3: dO(0), 2: dO(0)}) == 1 + 2
    # Behind dO:3 and dO:2: 4 | 4 | 9.
    assert lost({3: dO(2), 2: dO(1)}) == 4 + 4 + 1 + 2


def test_the_next_forward_is_a_run_of_its_own():
    # 8 kernels, cut after 2: those two, and the call; the 6 that follow are captured.
    assert lost({3: F(1)}) == 2 + 1
    assert lost({3: F(0)}) == 1


def test_numbers_are_checked():
    for wrong in ({"dO:1": -1}, {"dO:1": float("nan")}):
        with pytest.raises(OptionsError, match="dO:1"):
            Capture(wrong, 1.0)
    with pytest.raises(OptionsError, match="launch_s"):
        Capture({}, float("inf"))
    with pytest.raises(OptionsError, match="capture must be"):
        plan(layers=[LayerCosts(1, 1, 1)], schedule="multi_stream", capture={"dO:1": 1})


LAYERS = [LayerCosts(2, 2, 2, occupancy=(0.5, 0.5, 0.5)) for _ in range(4)]


def test_launches_are_part_of_the_step():
    problem = Problem(tuple(LAYERS), options={"capture": Capture(KERNELS, 0.25)})
    free = Problem(tuple(LAYERS))
    placement = {3: dO(2)}
    assert joint.step_s(problem, placement) == joint.step_s(free, placement) + 5 * 0.25


@pytest.mark.parametrize("policy", ["multi_stream", "search"])
def test_launches_that_cost_more_than_is_gained_keep_the_stock_order(policy):
    made = {
        launch_s: plan(layers=LAYERS, schedule=policy, capture=Capture(KERNELS, launch_s))
        for launch_s in (0.0, 1e-3, 10.0)
    }
    assert (0, 1) in made[0.0].lanes
    assert (0, 1) in made[1e-3].lanes
    assert (0, 1) not in made[10.0].lanes


def test_a_gain_moves_to_where_less_is_lost():
    """dW:3 gains a little more beside dO:2; starting there leaves four kernels out of the graphs."""
    gains = {("dO:2", 3): 1.1, ("dO:0", 3): 1.0}
    problem = Problem(tuple(LAYERS), options={"gains": gains})
    assert joint.fill(problem)[3] == dO(2)
    problem = Problem(tuple(LAYERS), options={"gains": gains, "capture": Capture(KERNELS, 0.1)})
    assert joint.fill(problem)[3] == dO(0)


def test_measured_gains_of_a_long_dw_add_up_over_regions():
    """dW:3 takes 6 s, three regions of 2 s; each saves what was measured there."""
    layers = [*LAYERS[:3], LayerCosts(2, 2, 6)]
    gains = {("dO:2", 3): 1.0, ("dO:1", 3): 1.0, ("dO:0", 3): 1.0, ("F:0", 3): 2.5}
    assert joint.fill(Problem(tuple(layers), options={"gains": gains}))[3] == dO(1)
    # dO:1, dO:0 and F:0: 1 + 1 + 2.5, more than 3 from dO:2 and 2.5 + nothing from F:0.


def test_calculated_gains_are_those_of_occupancy():
    found = joint.calculated_gains(Problem(tuple(LAYERS)))
    assert found["dO:2", 3] == pytest.approx(2.0)  # halves side by side: all of it
    assert ("dO:3", 3) not in found
    assert all(layer for _, layer in found)
