"""The rounds of tasks, from schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo import LayerCosts, plan
from tf_ooo.modes.layerpipe.rounds import HIGH, stages_of

SECONDS = st.floats(0.1, 10.0)
LAYERS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=2, max_size=7)


def made(costs, devices, schedule="layerpipe"):
    layers = [LayerCosts(*one) for one in costs]
    return plan(layers=layers, schedule=schedule, mode="layerpipe", devices=devices, microbatches=3)


def test_by_hand():
    """Two processors, two layers: the second one's dO is divided."""
    stages = stages_of(made([(3, 3, 2), (2, 4, 2)], 2), 2)
    assert stages.processors == 2
    assert stages.of["F", 0] == 0
    assert stages.of["dW", 1] == 1
    assert stages.stages_after(0) == 1
    assert stages.round_of("U", 0) - stages.read_round(0) == 2


def test_layers_without_work():
    stages = stages_of(made([(1, 1, 1), (0, 0, 0), (1, 1, 1)], 2), 3)
    assert stages.of["F", 1] in (0, 1)
    assert stages.of["F", 0] <= stages.of["F", 1] <= stages.of["F", 2]


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.integers(1, 6), st.sampled_from(["layerpipe", "pipedream"]))
def test_every_task_comes_after_what_it_needs(costs, devices, schedule):
    """Another processor's result is there a round later; gradients are 2 S(l) rounds late."""
    devices = min(devices, len(costs) if schedule == "pipedream" else 3 * len(costs))
    stages = stages_of(made(costs, devices, schedule), len(costs))
    assert stages.processors == devices
    for layer in range(len(costs)):
        forward = stages.round_of("F", layer)
        for kind in ("dO", "dW"):
            back = stages.round_of(kind, layer)
            assert back > forward or stages.of[kind, layer] == stages.of["F", layer] == devices - 1
            if layer + 1 < len(costs):
                above = stages.of["dO", layer + 1]
                assert stages.round_of("dO", layer + 1) <= back
                assert stages.round_of("dO", layer + 1) < back or above == stages.of[kind, layer]
        if layer:
            assert stages.round_of("F", layer - 1) <= forward
        assert stages.round_of("U", layer) >= stages.round_of("dW", layer)
        assert stages.round_of("U", layer) - stages.read_round(layer) == 2 * stages.stages_after(layer)
    for layer, (share, high) in stages.shares.items():
        assert 0 < share < 1
        assert high == stages.of[HIGH, layer] > stages.of["dO", layer]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_pipedream_has_whole_layers(devices):
    stages = stages_of(made([(1, 2, 1)] * 4, devices, "pipedream"), 4)
    assert not stages.shares
    assert all(len({stages.of[kind, layer] for kind in ("F", "dO", "dW")}) == 1 for layer in range(4))
