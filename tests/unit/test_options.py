from __future__ import annotations

import pytest

from tf_ooo.errors import OOOError, OptionsError
from tf_ooo.options import Options


def test_defaults():
    assert Options().resolved_mode == "single_device"
    assert Options().may_fall_back
    assert not Options(schedule="in_order").may_fall_back


@pytest.mark.parametrize("mode", ["pipeline", "layerpipe"])
def test_later_modes_say_so(mode):
    with pytest.raises(OptionsError, match=f"{mode}.*later release"):
        Options(mode=mode)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "fast"), ("schedule", 3), ("memory_limit_bytes", 0), ("memory_limit_bytes", True),
     ("profile_steps", -1), ("profile_steps", 1.5), ("strict", "yes"), ("timeline", 3), ("dump_dir", ""),
     ("engine", "mpi"), ("op", "average"), ("compression", "int8"), ("weighting", 1), ("lockstep", "batch")],
)  # fmt: skip
def test_bad_value_names_option_and_value(name, value):
    with pytest.raises(OptionsError) as caught:
        Options(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "accepted:" in str(caught.value)
    assert isinstance(caught.value, OOOError)


def test_did_you_mean():
    with pytest.raises(OptionsError, match="did you mean 'fast_forward'"):
        Options(schedule="fast_foward")
    with pytest.raises(OptionsError, match="did you mean 'schedule'"):
        Options.from_arguments(shedule="auto")
