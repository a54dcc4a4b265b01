"""Sixty random set-ups, stock against rewritten: the same bits.  `make fuzz` runs others."""

from __future__ import annotations

import runpy
from dataclasses import replace

import pytest

from tests import forked
from tests.fuzz import catalogue
from tests.fuzz.drawing import cases, drawn
from tests.fuzz.program import program
from tests.fuzz.running import GOOD, run
from tests.fuzz.setups import Branch, Output, Part, Setup, Shared, Skip, rank_after
from tests.zoo import keras, needs_keras_3

pytestmark = pytest.mark.takes(140)
NUMBERS = range(60)


@needs_keras_3  # as the programs of all set-ups
@pytest.mark.parametrize("number", NUMBERS)
def test_the_same_bits(number):
    setup = drawn(number)
    outcome = run(setup)
    assert outcome.kind == GOOD, f"{outcome.text}\n{program(setup)}"


def arguments_of(setups):
    return {name for setup in setups for part in setup.parts() for name, _ in part.arguments}


def test_the_sixty_have_everything_in_them():
    setups = [drawn(number) for number in NUMBERS]
    kinds = {part.kind.rpartition(".")[2] for setup in setups for part in setup.parts()}
    wanted = (catalogue.LAYERS, catalogue.CELLS, catalogue.OPTIMIZERS, catalogue.LOSSES, ["Embedding"])
    assert {kind for kinds_of in wanted for kind in kinds_of} - kinds == set()
    assert kinds & set(catalogue.RATE_SCHEDULES)
    options = {*catalogue.CLIPPING, *catalogue.AVERAGES, "kernel_regularizer", "activity_regularizer"}
    options |= {"kernel_constraint", "trainable", "unroll", "recurrent_dropout", "seed", "go_backwards"}
    assert options - arguments_of(setups) == set()
    steps = [s for setup in setups for s in (*setup.trunk, *(s for b in setup.branches for s in b.steps))]
    assert {type(step) for step in steps} == {Part, Skip, Shared}
    joins = {setup.join for setup in setups if len(setup.branches) > 1}
    assert joins | {step.join for step in steps if isinstance(step, Skip)} == set(catalogue.JOINS)
    assert {branch.kind for setup in setups for branch in setup.branches} == set(catalogue.RANKS)
    assert {setup.policy for setup in setups} == set(catalogue.POLICIES)
    assert {setup.schedule for setup in setups} == {"fast_forward", "in_order"}
    assert {setup.steps_per_execution for setup in setups} == {1, 2, 3}
    assert {setup.profile_steps for setup in setups} == {0, 2}
    assert {setup.rows for setup in setups} == {14, 16}  # in batches of 4
    assert {setup.epochs for setup in setups} == {1, 2}
    assert {setup.sample_weights for setup in setups} == {True, False}
    assert {len(setup.outputs) for setup in setups} == {1, 2}
    assert any(output.metrics for setup in setups for output in setup.outputs)
    assert any(output.loss_weight for setup in setups for output in setup.outputs)


def fits_together(steps, rank):
    """Each layer takes what comes before it; the rank after them, or None."""
    for step in steps:
        rank = rank and rank_after(step, rank)
    return rank


@pytest.mark.parametrize("seed", [3, 77])
def test_any_other_seed_gives_other_set_ups_that_fit_together(seed):
    setups = [drawn(seed * 10**6 + place) for place in range(500)]
    for setup in setups:
        assert fits_together(setup.trunk, 1) == 1
        assert all(fits_together(branch.steps, catalogue.RANKS[branch.kind]) for branch in setup.branches)
        assert all((branch.kind == "tokens") == (branch.embedding is not None) for branch in setup.branches)
    assert len({repr(replace(setup, number=0)) for setup in setups}) == len(setups)
    assert setups[:3] == [drawn(seed * 10**6 + place) for place in range(3)]


def test_minimal_keeps_what_matters_only():
    """A large set-up has a fault: tied weights under a clipped norm."""

    def has_fault(setup):
        text = program(setup)
        return "shared(h)" in text and "clipnorm" in text

    large = next(setup for setup in map(drawn, range(10**6)) if has_fault(setup) and len(repr(setup)) > 1200)
    smallest = cases("single").minimal(large.number, has_fault)
    assert has_fault(smallest)
    assert len(smallest.branches) == len(smallest.outputs) == 1
    assert len(smallest.branches[0].steps) + len(smallest.trunk) <= 2
    assert (smallest.policy, smallest.steps_per_execution, smallest.epochs) == ("float32", 1, 1)
    assert len(repr(smallest)) < len(repr(large)) / 2


def two_dense_layers(**changes):
    steps = tuple(Part("layers.Dense", (("units", 5), ("activation", name))) for name in ("tanh", "relu"))
    output = Output(3, Part("keras.losses.MeanSquaredError"))
    adam = Part("keras.optimizers.Adam", (("learning_rate", 0.02),))
    plain = Setup(5, (Branch("features", (7,), steps),), "Concatenate", (), (output,), adam)
    return replace(plain, **changes)


@pytest.fixture
def tanh_gradients_are_wrong(monkeypatch):
    """In the rewritten graph only, after it was verified."""
    from tf_ooo.rewriting import planner

    rewrite = planner.rewrite_graph

    def wrong(*arguments):
        result = rewrite(*arguments)
        for node in result.graph_def.node:
            if node.op == "TanhGrad":
                node.input[1] = node.input[0]
        return result

    monkeypatch.setattr(planner, "rewrite_graph", wrong)


@needs_keras_3
@pytest.mark.alone
def test_a_planted_fault_is_found_and_made_minimal(tanh_gradients_are_wrong):
    setup = two_dense_layers(steps_per_execution=2)
    outcome = run(setup)
    assert outcome.kind == "not the same bits"
    assert "kernel" in outcome.text


@needs_keras_3
@pytest.mark.alone
def test_a_planted_fault_is_made_minimal(tanh_gradients_are_wrong):
    """Hypothesis looks for the simplest program with the activation, in which the fault must still be."""
    number = next(n for n in range(10**6) if 'Dense(units=8, activation="tanh"' in program(drawn(n)))
    smallest = cases("single").minimal(
        number, lambda setup: 'Dense(units=3, activation="tanh")' in program(setup)
    )
    assert smallest.optimizer == Part("keras.optimizers.SGD", (("learning_rate", 0.02),))
    assert run(smallest).kind == "not the same bits"


def _run_as_first(script):
    """Names of layers are numbered as in a process that has built no other model."""
    keras.backend.clear_session()
    runpy.run_path(script)


@needs_keras_3
@pytest.mark.alone
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_printed_program_says_the_same(tanh_gradients_are_wrong, tmp_path, activation):
    """A script alone, beside what is run here; the fault is in both processes, and fails the first."""
    steps = (Part("layers.Dense", (("units", 5), ("activation", activation))),)
    setup = two_dense_layers(branches=(Branch("features", (7,), steps),))
    script = tmp_path / "setup.py"
    script.write_text(program(setup))
    process = forked.start(_run_as_first, str(script))
    said = process.communicate(timeout=200)[0]
    outcome = forked.result_of(run, setup)
    assert "moved ops" in said
    assert outcome.failed == (activation == "tanh")
    assert process.returncode == (1 if outcome.failed else 0), said
    if outcome.failed:
        assert outcome.text.splitlines()[0].startswith("AssertionError: not the same bits: ['loss'")
        assert outcome.text.splitlines()[0] in said
