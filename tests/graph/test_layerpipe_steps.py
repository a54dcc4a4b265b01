"""``mode="layerpipe"``: steps and batches of many kinds, against training by hand: see layerpipe_steps.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import found_by

SCRIPT = Path(__file__).with_name("layerpipe_steps.py")


def check(name):
    return found_by(SCRIPT, name)[name]


def test_conditions_on_the_count_of_steps():
    found = check("schedules_with_conditions")
    assert found.pop("planned")
    assert found.keys() == {"warm-up", "restarts"}
    for name, (distance, matters) in found.items():
        assert distance < 1e-6, name
        assert matters > 0.01, name


def test_conditions_on_labels():
    found = check("losses_with_conditions")
    assert found["distance"] < 1e-6
    assert found["moved"] > 0.05


def test_batches_of_one_size():
    found = check("batches_of_one_size")
    assert found["distance"] < 1e-6
    assert found["divided"] == [["1"], ["1"]]


def test_what_can_be_divided_is():
    found = check("divided_output_gradients")
    one = found["transposed"]
    assert one["divided"] == ["1"]
    assert [row.rpartition("/")[2] for row in one["rows"]] == ["second"]
    assert one["distance"] < 2e-6
    one = found["scaled"]
    assert one["divided"] == one["rows"] == one["planned"] == one["notes"] == []
    # Of 19 seconds 8 cannot be divided, and 2 are above them.
    assert one["predicted_step_s"] == pytest.approx(11, abs=1.01)
    assert one["distance"] < 2e-6


@pytest.mark.slow
def test_optimizers_with_state():
    for name, one in check("optimizers_with_state").items():
        late, in_time = one["distances"]
        assert one["late"] == 4, name
        assert late < 2e-5, name
        assert in_time > max(100 * late, 1e-3), name


def test_weights_of_samples():
    found = check("weights_of_samples")
    assert found["late"] == 4
    assert found["distance"] < 2e-6


def test_sparse_batches():
    assert check("sparse_batches")["distance"] < 1e-6
