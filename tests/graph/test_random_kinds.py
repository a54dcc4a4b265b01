"""Random set-ups of what users write themselves, on one device and as pipelines; see `make fuzz-kinds`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fuzz.kinds.drawing import KINDS, drawn
from tests.zoo import needs_keras_3

pytestmark = [needs_keras_3, pytest.mark.devices(2), pytest.mark.takes(20)]


def first(kind, mode, **wanted):
    """The first set-up of that kind with these values in its fields."""
    setups = (drawn(number, mode) for number in itertools.count())
    return next(s for s in setups if s.kind == kind and all(getattr(s, n) == v for n, v in wanted.items()))


def outcome_of(setup):
    from tests.fuzz.kinds.judging import run

    return run(setup)


@pytest.mark.parametrize("kind", ["sparse input", "remat", "several optimizers"])
def test_one_device_has_the_bits_of_stock(kind):
    setup = first(kind, "single", body="dense")
    outcome = outcome_of(setup)
    assert outcome.kind == "good", f"{setup}: {outcome.text}"


@pytest.mark.parametrize(
    ("kind", "variant", "wanted"),
    [
        ("frozen after compile", "frozen", "good"),
        ("Lambda over rows", "mean", "refused"),
        ("own logs", "all", "said"),
        ("BatchNormalization", "default", "said"),
    ],
)
def test_a_pipeline_trains_as_stock_or_says_why_not(kind, variant, wanted):
    setup = first(kind, "pipeline", variant=variant, body="dense", microbatches=2, rows=16)
    outcome = outcome_of(setup)
    assert outcome.kind == wanted, f"{setup}: {outcome.text}"


def test_every_kind_has_its_turn_with_every_variant():
    count = len(KINDS) * max(map(len, KINDS.values()))
    drawn_here = {(setup.kind, setup.variant) for setup in map(drawn, range(4 * count))}
    assert drawn_here == {(kind, variant) for kind, variants in KINDS.items() for variant in variants}
    modes = [drawn(7, mode) for mode in ("single", "pipeline", "data_parallel")]
    assert [setup.options["mode"] for setup in modes] == ["single_device", "pipeline", "data_parallel"]
    assert len({(s.kind, s.variant, s.body, s.optimizer[0], s.rows) for s in modes}) == 1


@pytest.fixture
def judging():
    from tests.fuzz.kinds import judging

    return judging


def trained(**fields):
    from tests.fuzz.kinds.training import Trained

    return Trained(report=SimpleNamespace(rewritten_graph=True, notes=[], fallback_reason=""), **fields)


MEETS = "StepRefused: rows first meet at layer 'lambda': it compares rows with one another"


@pytest.mark.parametrize(
    ("refusal", "changed", "microbatches", "wanted"),
    [
        (MEETS, [], 2, "refused"),
        (MEETS, ["dense/kernel"], 2, "refused after a weight changed"),
        (MEETS, [], 1, "refused without need"),
        ("OptionsError: something else", [], 2, "a refusal does not name it"),
    ],
)
def test_a_refusal_is_for_the_very_thing(judging, refusal, changed, microbatches, wanted):
    setup = first("Lambda over rows", "pipeline", microbatches=microbatches)
    outcome = judging._of_refusal(setup, trained(refused=refusal, changed=changed))
    assert outcome.kind == wanted


@pytest.mark.parametrize(
    ("early", "late", "wanted"),
    [
        (["BatchNormalization normalizes by itself: batch_normalization, over 4 rows"], [], "said"),
        ([], ["BatchNormalization normalizes by itself: batch_normalization, over 4 rows"], "another result"),
        (["28 ops counted as taking no time"], [], "another result"),
    ],
)
def test_a_note_counts_where_it_names_it_before_the_first_step(judging, monkeypatch, early, late, wanted):
    setup = replace(first("BatchNormalization", "pipeline", microbatches=2), dtype="float64")
    outcome = judging._of_pipeline(setup, {"dense/kernel": 0.1}, trained(early=early, said=[*early, *late]))
    assert outcome.kind == wanted


def test_what_one_of_them_lacks_is_a_difference(judging):
    ones, zeros = np.ones(2, "float32"), np.zeros(2, "float32")
    stock, ours = trained(values=[("a", ones), ("b", ones)]), trained(values=[("a", zeros), ("c", ones)])
    off = judging.differences(stock, ours)
    assert off == {"a": 1.0, "b": float("inf"), "c": float("inf")}
