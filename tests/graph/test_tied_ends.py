"""A model whose output layer uses the embedding's table, over a slow link: both ends on one device."""

from __future__ import annotations

import dataclasses

import pytest

from tests.graph.pipeline_fits import Training, assert_same_bits, pipelined
from tests.graph.pipeline_models import NEXT_WORDS, WORDS, Tied, adam
from tf_ooo import Link

pytestmark = pytest.mark.devices(3)
TABLE_BYTES = 4 * 29 * 8


def test_the_ends_meet_where_gradients_of_the_table_would_take_long():
    training = Training(Tied, adam, (WORDS, NEXT_WORDS))
    costs = training.piped(pipelined("gpipe", microbatches=3)).report.costs
    assert costs.layers[0].weight_bytes == TABLE_BYTES
    assert [layer.tied for layer in costs.layers if layer.tied] == [((0, float(TABLE_BYTES)),)]
    layers = tuple(
        dataclasses.replace(layer, forward_s=2e-3, output_grad_s=1e-3, weight_grad_s=1e-3, output_bytes=9)
        for layer in costs.layers
    )
    fits, said = {}, {}
    for schedule, bytes_per_s in (("1f1b", 1e9), ("auto", 1e4)):
        alike = dataclasses.replace(costs, layers=layers, link=Link(1e-4, bytes_per_s))
        fits[schedule] = training.piped(pipelined(schedule, microbatches=3, costs=alike))
        said[schedule] = (
            "928 bytes of gradients go to stage 0, whose weights it uses" in fits[schedule].report.summary()
        )
    assert said == {"1f1b": True, "auto": False}
    places = [stage["device"] for stage in fits["auto"].report.pipeline["stages"]]
    assert places[0] == places[-1]
    assert_same_bits(training, fits, far=1e-4, weights_everywhere=False)
