"""HLO that is exported for a GPU machine: ours has calls on a side stream, stock XLA's has none."""

from __future__ import annotations

import re

import pytest

from benchmarks.gpu import export_hlo
from benchmarks.gpu.hlo_text import apart, fed_back, looped, parameters_of
from tests.zoo import needs_xla_streams
from tf_ooo.compat import xla

pytestmark = needs_xla_streams


@pytest.fixture(scope="module")
def step():
    """The smallest network and its batch."""
    return export_hlo._compiled("rnn-small", 2)


@pytest.mark.parametrize("way", [export_hlo.STOCK, *export_hlo.OURS])
def test_calls_on_streams(step, way):
    calls = xla.stream_calls(export_hlo.hlo_of_step(*step, way))
    assert bool(calls) == (way != export_hlo.STOCK)


def test_each_call_apart_has_a_transform(step):
    hlo = export_hlo.hlo_of_step(*step, "early")
    calls = xla.stream_calls(hlo)
    text = apart(hlo)
    assert xla.stream_calls(text) == calls
    transforms = re.findall(r"= c64\[2\] fft\(", text)
    called = set(re.findall(r"to_apply=(%\S+), frontend_attributes=\{_xla_stream_annotation", text))
    assert len(transforms) == len(called) > 0
    assert apart(export_hlo.hlo_of_step(*step, export_hlo.STOCK)).count("fft") == 0


def test_a_loop_takes_and_returns_what_a_step_does(step):
    hlo = export_hlo.hlo_of_step(*step, "early")
    loop = looped(hlo, 7)
    assert parameters_of(loop) == parameters_of(hlo)
    assert fed_back(loop) == fed_back(hlo) != []
    assert "constant(7)" in loop
    assert loop.count(" while(") == 1
