"""``costs=`` of whole layers, and of other parts, where layers are divided; on two logical devices."""

from __future__ import annotations

import dataclasses

import pytest

import tf_ooo
from tests.graph.pipeline_fits import Training, assert_same_bits, fits_of
from tests.graph.pipeline_models import EVEN, adam, long_tail
from tests.zoo import needs_keras_3
from tf_ooo.costs import CostTable
from tf_ooo.costs.layer_costs import SECONDS
from tf_ooo.errors import OptionsError
from tf_ooo.rewriting.parts import is_part, layer_of_part

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(30), needs_keras_3]


@pytest.fixture(scope="module")
def training():
    return Training(long_tail, adam, EVEN, epochs=2)


def table(*seconds):
    return CostTable([tf_ooo.LayerCosts(s, 2 * s, 3 * s, 0.5 * s) for s in seconds])


def totals(layers):
    return {field: sum(getattr(layer, field) for layer in layers) for field in SECONDS.values()}


def test_the_seconds_of_whole_layers_are_shared(training):
    """Three layers in the table; the first one has parts behind its weights."""
    whole = table(6.0, 2.0, 1.0)
    fits = fits_of(training, "gpipe", "zb_h1", "zb_interleaved", microbatches=3, costs=whole)
    assert_same_bits(training, fits, far=1e-4, weights_everywhere=False)
    costs = fits["gpipe"].report.costs
    assert sum(is_part(layer.name) for layer in costs.layers) >= 2
    assert totals(costs.layers) == pytest.approx(totals(whole.layers))
    names = [layer_of_part(layer.name) or layer.name for layer in costs.layers]
    of_first = [layer for layer, name in zip(costs.layers, names, strict=True) if name == names[0]]
    assert totals(of_first) == pytest.approx(totals(whole.layers[:1]))
    assert costs.layers[-1].forward_s == pytest.approx(1.0)


def test_the_table_of_the_same_parts_stays(training):
    calculated = fits_of(training, "gpipe", microbatches=3)["gpipe"].report.costs
    slower = dataclasses.replace(calculated, layers=tuple(layer.scaled(2) for layer in calculated.layers))
    fitted = fits_of(training, "gpipe", microbatches=3, costs=slower)["gpipe"]
    assert fitted.report.costs.layers == slower.layers


def test_the_table_of_another_model_is_refused(training):
    with pytest.raises(OptionsError, match="costs= has 2 layers, the model 3"):
        fits_of(training, "gpipe", microbatches=3, costs=table(1.0, 1.0))
