"""What ``auto`` means for LayerPipe."""

import pytest

import tf_ooo
from tf_ooo.layerpipe.choice import LEAST_GAIN, schedule_for
from tf_ooo.simulator import simulate


def costs(*seconds):
    """Layers whose F, dO and dW take so long each."""
    return [tf_ooo.LayerCosts(one, one, one, name=f"l{n}") for n, one in enumerate(seconds)]


def step_s(schedule, layers):
    return simulate(schedule, layers, tf_ooo.Link()).steady_step_s


def test_layers_that_no_cut_shares_evenly_are_divided():
    layers = costs(1.0, 1.0, 1.0)
    schedule, note = schedule_for("auto", layers, tf_ooo.Link(), 2, 8)
    assert (schedule.policy, note) == ("layerpipe", "")
    whole, _ = schedule_for("pipedream", layers, tf_ooo.Link(), 2, 8)
    assert step_s(whole, layers) / step_s(schedule, layers) == pytest.approx(4 / 3, rel=0.02)


def test_layers_are_left_whole_where_that_costs_little():
    layers = costs(1.0, 1.0, 1.0, 1.1)
    schedule, note = schedule_for("auto", layers, tf_ooo.Link(), 2, 8)
    assert schedule.policy == "pipedream"
    assert f"from {LEAST_GAIN}x" in note
    assert "gain 1.02x" in note


def test_more_devices_than_layers():
    schedule, note = schedule_for("auto", costs(1.0, 1.0), tf_ooo.Link(), 4, 8)
    assert (schedule.policy, note) == ("layerpipe", "")
    with pytest.raises(tf_ooo.OptionsError, match="more than the tasks"):
        schedule_for("auto", costs(1.0, 1.0), tf_ooo.Link(), 9, 8)


def test_a_named_schedule_is_made_as_asked():
    schedule, note = schedule_for("layerpipe", costs(1.0, 1.0, 1.0, 1.1), tf_ooo.Link(), 2, 8)
    assert (schedule.policy, note) == ("layerpipe", "")
