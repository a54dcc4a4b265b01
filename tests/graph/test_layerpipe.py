"""``mode="layerpipe"`` on logical CPU devices: delays, weights and losses are those of training by hand."""

from __future__ import annotations

import pytest

from tests.graph.layerpipe_by_hand import by_hand, distance, mean_losses, perceptron, same
from tests.graph.layerpipe_spread import (
    STAGES,
    TOGETHER,
    assert_spread,
    placed,
    spread_over,
)
from tf_ooo.modes.layerpipe.reporting import version_bytes
from tf_ooo.modes.layerpipe.rounds import HIGH
from tf_ooo.tracing.variables import bytes_of

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(40)]

_WAYS = ("stash", "latest", "ema")
# The others differ from these in what does not depend on the weights.
_MORE_WAYS = {"two": _WAYS, "four": ("stash", "ema"), "dW apart": _WAYS, "F apart": _WAYS}
_MORE_WAYS["dO in two parts below dW"] = ("stash", "ema")
CASES = [(name, weights) for name in STAGES for weights in _MORE_WAYS.get(name, ("stash",))]
# Layer 1's F is on processor 1, its dW on 0: the forward pass reads weights that come from there, a round old
# in round 0; dO's, in round 2, too: they are 2 updates later, of the 4 that the layer's gradient is late.
_BEHIND = {"F apart": (4, 2, 2, 0)}
# There layer 2's weights come from processor 3 to those of both parts: they are read in rounds 3 and 4, the
# forward pass's in round 0.
_BEHIND["dO in two parts below dW"] = (6, 4, 4, 0)
_DIVIDED = {"dO in two parts below dW": {2: (0.4, 3)}}
_HIGH_DEVICES = {
    "lowest dO in two parts": {"CPU:1"},
    "dO in two parts": {"CPU:2"},
    "dO in two parts below dW": {"CPU:2"},
}


def delays_of(stages):
    return [2 * stages.stages_after(layer) for layer in range(4)]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_delays_are_twice_the_stages_after(name, weights):
    """The weights, losses and delays of training by hand, whatever the processors do, with uneven batches."""
    stages = STAGES[name]
    trained, losses, made = spread_over(stages, weights)
    how = {"behind": _BEHIND.get(name), "divided": _DIVIDED.get(name)}
    expected, by_batch = by_hand(delays_of(stages), weights, **how)
    assert distance(trained, expected) < 1e-6
    assert distance([mean_losses(by_batch)], [losses]) < 1e-6
    assert distance(trained, perceptron().get_weights()) > 0.05
    assert made.notes == ()
    assert sorted(made.rounds.delay_steps.values()) == sorted(2 * delays_of(stages))  # kernels and biases
    assert max(key[2] for key in made.ticks._functions) == TOGETHER
    assert assert_spread(made, stages.processors) > 20
    assert devices_of_high(made) == _HIGH_DEVICES.get(name, set())
    assert_bytes(made, name, weights, sum(w.nbytes for w in trained))


def devices_of_high(made):
    """Return the devices of the parts of output gradients that are nearer to the loss."""
    ops = [op for op, (kind, _) in made.traced.where.items() if kind == HIGH]
    return {made.rounds.device_of[op][-5:] for op in ops if op in made.rounds.device_of}


def assert_bytes(made, name, weights, weights_bytes):
    """Averages take at most one copy of the weights, however many processors there are."""
    sizes = version_bytes(made)
    if weights == "ema":
        assert 0 < sizes["ema"] <= weights_bytes
    else:
        assert sizes["ema"] == 0
    if name != "one":
        assert (sizes["stash"] > 0) == (weights == "stash")


def test_frozen_weights_are_not_copied_in_every_round():
    """Forward and dO of the frozen layer are on two devices: one copy, and nothing of it in registers."""
    stages = placed([0, 2, 2], [0, 1, 2], [0, 1, 2])
    trained, _, made = spread_over(stages, "stash", frozen=2)
    expected, _ = by_hand([4, 2, 0, 0], "stash", frozen=(2,))
    before, kernel = perceptron().get_weights(), trained[4]
    assert distance(trained, expected) < 1e-6
    assert distance(trained[:1], before[:1]) > 0.05
    assert same(trained[4:6], before[4:6])
    assert bytes_of(made.ticks.copies.variables) == kernel.nbytes
    shapes = [made.traced.outputs[r.source.partition(":")[0]][0].shape for r in made.delays.registers]
    assert shapes
    assert not {kernel.shape, kernel.shape[::-1]} & set(shapes)
