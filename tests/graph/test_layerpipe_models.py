"""``mode="layerpipe"`` for models of many kinds, against training by hand: see layerpipe_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import found_by

SCRIPT = Path(__file__).with_name("layerpipe_models.py")


def check(name):
    return found_by(SCRIPT, name)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "embedded", "two_inputs", "custom_train_step", "bfloat16"])
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
def test_stopped_and_failed_training():
    found = check("endings")
    assert 5 <= found["taken"] <= 14
    assert found["distance"] < 1e-6
    assert found["places"] == [["CPU:0"]] * 3
    assert found["error"] == "stopped here"
    assert found["finite"]
