"""Tests what random set-ups draw for several devices and several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz.drawing import cases, drawn
from tests.fuzz.program import program
from tests.fuzz.setups import Pipeline, Ranks
from tests.fuzz.several import LAUNCHES, ORDERS, SCHEDULES, SMOOTH

NUMBERS = range(400)
DENSE = 'h = layers.Dense(units=5, activation="tanh")(h)'


def test_two_schedules_and_layers_enough_for_both():
    setups = [drawn(number, "pipeline") for number in NUMBERS]
    pairs = {tuple(pipeline.schedule for pipeline in setup.pipelines) for setup in setups}
    assert all(first != second for first, second in pairs)
    assert {first for first, _ in pairs} == {second for _, second in pairs} == set(SCHEDULES)
    assert len({frozenset(pair) for pair in pairs}) > 70  # of 105
    assert all(len({pipeline.replicas for pipeline in setup.pipelines}) == 1 for setup in setups)
    for setup in setups:
        added = len(setup.model) - len(drawn(setup.number).model)
        assert setup.trained_layers + added + len(setup.outputs) >= max(
            pipeline.layers for pipeline in setup.pipelines
        )
    pipelines = [pipeline for setup in setups for pipeline in setup.pipelines]
    assert {pipeline.devices for pipeline in pipelines} == {2, 3, 4}
    assert {pipeline.profile_steps for pipeline in pipelines} == {0, 1, 2}
    assert {setup.microbatches for setup in setups} == {1, 2, 3, 4}


def test_the_second_pipeline_is_compiled_and_updates_are_smooth():
    setups = [drawn(number, "compiled_pipeline") for number in NUMBERS]
    for setup in setups:
        assert [pipeline.compile_tasks for pipeline in setup.pipelines] == [None, True]
        before = drawn(setup.number, "pipeline")
        assert (setup.model, setup.inputs, setup.outputs) == (before.model, before.inputs, before.outputs)
        assert setup.epochs > 1
        assert "fits.compiled_pipelines(" in program(setup)
    optimizers = [setup.optimizer.partition("(")[0].rpartition(".")[2] for setup in setups]
    assert set(optimizers) == set(SMOOTH)
    assert optimizers.count("SGD") > len(setups) / 2
    assert "set_floatx" in program(replace(setups[0], policy="float64"))
    assert "set_floatx" not in program(replace(drawn(0, "pipeline"), policy="float64"))


def test_ranks_are_compiled_in_an_order_of_a_name():
    setups = [drawn(number, "compiled_data_parallel") for number in NUMBERS]
    assert {setup.ranks.compile_tasks for setup in setups} == {True}
    assert "auto" not in {setup.ranks.schedule for setup in setups}
    assert {setup.ranks.launch for setup in setups} == set(LAUNCHES)
    assert all("fits.compiled_ranks(moves=" in program(setup) for setup in setups)


def test_all_schedules_are_in_the_suite_s_twelve():
    """They are as in tests/graph/test_random_pipelines.py; replicas and layers that run again are, too."""
    drawn_here = [pipeline for number in range(12) for pipeline in drawn(number, "pipeline").pipelines]
    assert {pipeline.schedule for pipeline in drawn_here} == set(SCHEDULES)
    assert {pipeline.replicas for pipeline in drawn_here} == {1, 2}
    assert {pipeline.recompute for pipeline in drawn_here} == {"none", "all"}


@pytest.mark.parametrize(
    ("pipeline", "layers"),
    [
        (Pipeline("zb_h1", 3), 3),
        (Pipeline("zb_v", 3), 6),
        (Pipeline("interleaved_1f1b", 2), 4),
        (Pipeline("interleaved_1f1b", 2, chunks=3), 6),
        (Pipeline("modulo", 4), 4),
        (Pipeline("modulo", 4, group=2), 7),
        (Pipeline("auto", 2), 2),
    ],
)
def test_layers_that_a_schedule_needs(pipeline, layers):
    assert pipeline.layers == layers


def test_a_printed_pipeline_has_devices_enough():
    setup = drawn(3, "pipeline")
    most = max(pipeline.devices for pipeline in setup.pipelines)
    assert f"LogicalDeviceConfiguration()] * {most})" in program(setup)


def test_every_launch_order_and_option_of_ranks():
    setups = [drawn(number, "data_parallel") for number in NUMBERS]
    ranks = [setup.ranks for setup in setups]
    assert {each.launch for each in ranks} == set(LAUNCHES)
    assert {each.schedule for each in ranks} == set(ORDERS)
    assert {each.k for each in ranks} == {None, 0, 1, 2, 3}
    assert {each.compression for each in ranks} == {"none", "fp16"}
    assert {each.op for each in ranks} == {"Average", "Sum"}
    assert {each.lockstep for each in ranks} == {"auto", "epoch", "execution"}
    assert {setup.steps_per_execution for setup in setups} == {1, 2, 3, 4}
    assert not any(each.engine == "collectives" and each.compression != "none" for each in ranks)


def test_executions_are_left_after_those_that_are_measured():
    """A search needs six single steps, an order without costs one; then come four executions at least."""
    for setup in (drawn(number, "data_parallel") for number in NUMBERS):
        executions = setup.epochs * -(-4 // setup.steps_per_execution)
        first = {"search": 6, "fast_forward": 1}.get(setup.ranks.schedule)
        if first is not None:
            assert executions >= -(-first // setup.steps_per_execution) + 4


def test_modes_have_the_same_models():
    for number in range(50):
        single, several, ranks = (drawn(number, mode) for mode in ("single", "pipeline", "data_parallel"))
        assert single.model == ranks.model == several.model[: len(single.model)]
        assert single.optimizer == several.optimizer == ranks.optimizer
        assert set(several.model[len(single.model) :]) <= {DENSE}


def test_a_pipeline_and_ranks_are_made_simpler():
    first, second = cases("pipeline").minimal(3, lambda setup: True).pipelines
    assert (first, second.devices, second.recompute) == (Pipeline(), 2, "none")
    assert cases("data_parallel").minimal(3, lambda setup: True).ranks == Ranks()
