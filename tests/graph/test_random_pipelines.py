"""Random set-ups as pipelines on two devices: the same bits from gpipe and zb_h1."""

from __future__ import annotations

import pytest

from tests.fuzz.drawing import drawn
from tests.fuzz.program import program
from tests.fuzz.running import GOOD, run
from tests.zoo import needs_keras_3

pytestmark = [needs_keras_3, pytest.mark.devices(4), pytest.mark.takes(40)]


@pytest.mark.parametrize("number", range(12))
def test_the_same_bits_from_two_schedules(number):
    setup = drawn(number, "pipeline")
    outcome = run(setup)
    assert outcome.kind == GOOD, f"{outcome.text}\n{program(setup)}"
