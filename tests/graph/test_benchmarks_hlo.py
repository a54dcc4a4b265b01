"""HLO that is exported for a GPU machine: ours has calls on a side stream, stock XLA's has none."""

from __future__ import annotations

import pytest

from benchmarks.gpu import export_hlo
from tests.zoo import needs_xla_streams
from tf_ooo.compat import xla_functions

pytestmark = needs_xla_streams


@pytest.fixture(scope="module")
def step():
    """The smallest network and its batch."""
    return export_hlo._compiled("rnn-small", 2)


@pytest.mark.parametrize("way", export_hlo.WAYS)
def test_calls_on_streams(step, way):
    calls = xla_functions.stream_calls(export_hlo.hlo_of_step(*step, way))
    assert bool(calls) == (way != export_hlo.STOCK)
