"""mode="layerpipe" over two workers: the weights are those of training by hand with earlier weights."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed.clusters import addresses, device_of, workers
from tests.graph.layerpipe_by_hand import BATCHES, by_hand, data, perceptron
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable

pytestmark = pytest.mark.takes(20)
EQUAL_SECONDS = [(1.0, 1.0)] * 4


@pytest.fixture(scope="module")
def cluster():
    """A worker for each task."""
    cluster = addresses(2)
    with workers(cluster, [0, 1]):
        yield cluster


def train(cluster, seconds, **options):
    """One epoch of batches of unequal size; ``seconds``: of each layer's forward pass and its dO."""
    costs = CostTable([tf_ooo.LayerCosts(forward, back, 1.0) for forward, back in seconds], Link(1e-3, 1e9))
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=cluster, costs=costs, **options)
    x, y = data()
    batches = tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=tuple(tf.TensorSpec([None, part[0].shape[1]]) for part in (x, y)),
    )
    model = perceptron()
    model.fit(batches, verbose=0, callbacks=[callback])
    return model, callback.report


def distance(model, expected):
    return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), expected, strict=True))


def test_weights_of_two_updates_ago(cluster):
    """2 S(l) updates: the first worker's layers have one stage behind them."""
    model, report = train(cluster, EQUAL_SECONDS, schedule="pipedream")
    delays = [row["delay_steps"] for row in report.layers]
    assert delays == [2, 2, 0, 0]
    assert report.layerpipe["devices"] == [device_of(0), device_of(1)]
    assert int(model.optimizer.iterations) == BATCHES
    expected, _ = by_hand(delays, "stash")
    assert distance(model, expected) < 1e-6
    in_order, _ = by_hand([0] * 4, "stash")
    assert distance(model, in_order) > 1e-3


@pytest.mark.parametrize("weights", ["stash", "ema", "latest"])
def test_a_heavy_layer_is_computed_on_both_workers(cluster, weights):
    """``schedule="layerpipe"`` divides its dO."""
    seconds = [(1.0, 1.0), (1.0, 6.0), (1.0, 1.0), (1.0, 1.0)]
    model, report = train(cluster, seconds, schedule="layerpipe", weights=weights)
    assert list(report.layerpipe["divided"]) == ["1"]
    expected, _ = by_hand([row["delay_steps"] for row in report.layers], weights)
    assert distance(model, expected) < 1e-6
