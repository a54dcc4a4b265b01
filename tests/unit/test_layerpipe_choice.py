"""Tests what ``auto`` means for LayerPipe."""

import pytest

import tf_ooo
from tf_ooo.modes.layerpipe.planning import LEAST_GAIN, make_plan
from tf_ooo.planning.simulation.simulator import simulate


def costs(*seconds):
    """Layers whose F, dO and dW take so long each."""
    return [tf_ooo.LayerCosts(one, one, one, name=f"l{n}") for n, one in enumerate(seconds)]


def step_s(schedule, layers):
    return simulate(schedule, layers, tf_ooo.Link()).steady_step_s


def test_layers_that_no_cut_shares_evenly_are_divided():
    layers = costs(1.0, 1.0, 1.0)
    plan = make_plan("auto", layers, tf_ooo.Link(), 2, 8)
    assert (plan.schedule.policy, plan.why) == ("layerpipe", "")
    whole = make_plan("pipedream", layers, tf_ooo.Link(), 2, 8).schedule
    assert step_s(whole, layers) / step_s(plan.schedule, layers) == pytest.approx(4 / 3, rel=0.02)


def test_layers_are_left_whole_where_that_costs_little():
    layers = costs(1.0, 1.0, 1.0, 1.1)
    plan = make_plan("auto", layers, tf_ooo.Link(), 2, 8)
    assert plan.schedule.policy == "pipedream"
    assert f"from {LEAST_GAIN}x" in plan.why
    assert "gain 1.02x" in plan.why
    assert {candidate.name for candidate in plan.candidates} == {"pipedream", "layerpipe"}


def test_more_devices_than_layers():
    plan = make_plan("auto", costs(1.0, 1.0), tf_ooo.Link(), 4, 8)
    assert (plan.schedule.policy, plan.why) == ("layerpipe", "")
    with pytest.raises(tf_ooo.OptionsError, match="more than the tasks"):
        make_plan("auto", costs(1.0, 1.0), tf_ooo.Link(), 9, 8)


def test_a_named_schedule_is_made_as_asked():
    plan = make_plan("layerpipe", costs(1.0, 1.0, 1.0, 1.1), tf_ooo.Link(), 2, 8)
    assert (plan.schedule.policy, plan.why) == ("layerpipe", "")


def test_whole_layers_are_planned_as_they_run():
    """Rounds have 2 (P - 1 - s) + 1 batches in flight on stage s, where 1F1B has P - s."""
    layers = [tf_ooo.LayerCosts(1.0, 1.0, 1.0, activation_bytes=100) for _ in range(4)]
    schedule = make_plan("pipedream", layers, tf_ooo.Link(), 4, 32).schedule
    assert simulate(schedule, layers).peak_bytes == [700, 500, 300, 100]
    assert schedule.predicted_peak_bytes == 700
    planned = tf_ooo.plan(layers=layers, schedule="pipedream", mode="layerpipe", devices=4, microbatches=32)
    assert simulate(planned, layers).peak_bytes == [400, 300, 200, 100]
    assert step_s(schedule, layers) == pytest.approx(3.0)


def test_a_layer_is_divided_as_far_as_it_can_be():
    layers = [tf_ooo.LayerCosts(1.0, 1.0, 1.0), tf_ooo.LayerCosts(1.0, 8.0, 1.0)]

    def made(policy, **options):
        schedule = make_plan(policy, layers, tf_ooo.Link(), 2, 8, options).schedule
        return schedule.parts, step_s(schedule, layers)

    # 13 seconds of work, of which only the dO of 8 seconds lets each processor have half.
    parts, seconds = made("layerpipe")
    assert parts.keys() == {("dO", 1)}
    assert seconds == pytest.approx(6.5)
    # All but 7 of the 8 seconds, beside 3 of the layer below and 2 of F and dW.
    parts, seconds = made("layerpipe", lower_shares={1: (0.0, 0.125)})
    assert parts == {("dO", 1): pytest.approx((0.125, 0.875))}
    assert seconds == pytest.approx(7.0)
    for policy in ("layerpipe", "auto"):
        assert made(policy, lower_shares={1: (1.0, 1.0)}) == ({}, pytest.approx(8.0))
