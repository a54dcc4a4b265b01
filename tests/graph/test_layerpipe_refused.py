"""Passes that spoil a step which is spread over rounds: refused by name, before anything has been trained."""

from __future__ import annotations

import numpy as np
import pytest

import tf_ooo
from grappler_passes.passes.base import PassResult
from grappler_passes.passes.gates import GatesPass
from tests.graph import layerpipe_models as models
from tests.zoo import keras
from tf_ooo.modes.layerpipe.cutting import LATE, CutPass, RoundPass
from tf_ooo.modes.layerpipe.turns import WaitsPass
from tf_ooo.modes.layerpipe.versions import LaterWeightsPass

pytestmark = [pytest.mark.devices(4)]


def updates_of(graph_def):
    return [node for node in graph_def.node if node.op == "AssignSubVariableOp"]


def drop_an_update(graph_def):
    graph_def.node.remove(updates_of(graph_def)[-1])


def drop_a_product(graph_def):
    graph_def.node.remove(next(n for n in graph_def.node if n.op == "MatMul"))


def train_twice(graph_def):
    graph_def.node.add().CopyFrom(updates_of(graph_def)[-1])


def read_past_the_registers(graph_def):
    """A late tensor is read as this round makes it: another batch's."""
    node = next(n for n in graph_def.node if any(text.startswith(LATE) for text in n.input))
    node.input[0] = next(n.name for n in graph_def.node if n.op == "MatMul" and n is not node)


def swap_the_inputs_of_a_product(graph_def):
    node = next(n for n in graph_def.node if n.op == "MatMul")
    node.input[0], node.input[1] = node.input[1], node.input[0]


def transpose(graph_def):
    node = next(n for n in graph_def.node if n.op == "MatMul")
    node.attr["transpose_b"].b = not node.attr["transpose_b"].b


def subtract_in_the_place_of_adding(graph_def):
    next(n for n in graph_def.node if n.op == "BiasAdd").op = "Sub"


SPOILED = [
    (GatesPass, transpose),
    (CutPass, drop_an_update),
    (CutPass, train_twice),
    (CutPass, read_past_the_registers),
    (CutPass, transpose),
    (RoundPass, swap_the_inputs_of_a_product),
    (RoundPass, drop_a_product),
    (WaitsPass, transpose),
    (WaitsPass, drop_a_product),
    (LaterWeightsPass, subtract_in_the_place_of_adding),
    (LaterWeightsPass, drop_an_update),
]


@pytest.mark.parametrize(("spoiled", "spoil"), SPOILED, ids=lambda part: part.__name__)
def test_nothing_is_trained(monkeypatch, spoiled, spoil):
    run = spoiled.run

    def spoiling(self, graph_def, training_graph):
        result = run(self, graph_def, training_graph)
        spoil(result.graph_def)
        return PassResult(result.graph_def, True, replaced=result.replaced)

    monkeypatch.setattr(spoiled, "run", spoiling)
    model = models.compiled(models.mlp, (models.X, models.Y), models.keras_loss(), keras.optimizers.SGD(0.1))
    start = model.get_weights()
    callback = models.in_small_functions(2, 4, schedule="pipedream", weights="latest")
    with pytest.raises(tf_ooo.OOOError, match="rule '"):
        model.fit(models.X, models.Y, batch_size=models.ROWS, verbose=0, callbacks=[callback])
    for kept, was in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(kept, was)
    monkeypatch.undo()
    model.fit(models.X, models.Y, batch_size=models.ROWS, verbose=0)
    assert np.abs(model.get_weights()[0] - start[0]).max() > 0
