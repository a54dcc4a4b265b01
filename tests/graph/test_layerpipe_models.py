"""``mode="layerpipe"`` for models of many kinds, against training by hand: see layerpipe_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import found_by

CASES = ("tied", "embedded", "two_inputs", "custom_train_step", "bfloat16", "normalized", "used_twice")
SCRIPT = Path(__file__).with_name("layerpipe_models.py")


def check(name):
    return found_by(SCRIPT, name)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_late_gradients_of(name):
    one = check("models")[name]
    assert one["iterations"] == 14
    assert max(one["delays"].values()) == 4
    planned = one["planned"]
    for path, late in one["delays"].items():  # a layer of one weight has the weight's name
        assert late == planned.get(path.rpartition("/")[0], planned.get(path)), path
    # bfloat16: sums of products are rounded to 8 bits, in an order of the kernel's own.
    assert one["distance"] < (2e-2 if name == "bfloat16" else 2e-6)
    assert one["matters"] > max(100 * one["distance"], 1e-4) if name != "bfloat16" else one["matters"] > 0


@pytest.mark.slow
def test_two_versions_of_weights():
    """PipeDream-2BW with tables and AdamW, two epochs, each of which ends with a smaller group."""
    for name, one in check("two_versions").items():
        assert one["distance"] < 2e-6, name
        assert one["moved"] > 0.1, name
        assert one["updates"] == 2 * 4, name
        assert set(one["report"]["delay_updates"].values()) == {1}, name
        assert one["report"]["update_every"] == 4, name
        sizes = one["report"]["weight_version_bytes"]
        assert sizes["second"] == one["report"]["gradient_sum_bytes"] == one["weights_bytes"], name
        assert sizes["stash"] == 0, name
        assert "of 4 batches are one update, one update late" in one["summary"], name
        assert "not that of synchronous training" in one["notes"][0], name


@pytest.mark.slow
def test_stopped_and_failed_training():
    found = check("endings")
    assert 5 <= found["taken"] <= 14
    assert found["distance"] < 1e-6
    assert found["places"] == [["CPU:0"]] * 3
    assert found["error"] == "stopped here"
    assert found["finite"]
