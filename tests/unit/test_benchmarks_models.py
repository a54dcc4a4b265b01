"""The networks of the benchmarks: what they hold, and that making one twice gives the same bits."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from benchmarks import models

TABLES = models.NETWORKS


def test_sizes_are_those_of_the_known_networks():
    def weights(network):
        return network.build(rows=network.batch).count_params()

    depth, width = 16, 1280
    assert weights(TABLES["PIPELINE"]["feed_forward"]) == depth * (width + 1) * width + (width + 1) * 16
    convolutions = [
        layer
        for layer in TABLES["DATA_PARALLEL"]["resnet50"].build().layers
        if isinstance(layer, keras.layers.Conv2D)
    ]
    assert len(convolutions) == 1 + 3 * 16 + 4
    vgg = TABLES["LAYERPIPE"]["vgg16"].build().layers
    assert sum(isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)) for layer in vgg) == 16


@pytest.mark.parametrize("table", TABLES)
def test_labels_fit_the_outputs(table):
    for name, network in TABLES[table].items():
        model = network.build(rows=2)
        assert model.output_shape[1:] == (*network.labels, network.classes), name
        x, y = network.data(2)
        assert (x.shape[1:], y.shape[1:]) == (model.input_shape[1:], tuple(network.labels)), name


def test_the_same_weights_and_data_every_time():
    network = TABLES["MESH"]["mlp_falling"]
    made = [models.make(network, 2) for _ in range(2)]
    bits = [models.check_sum(models.weights_of(workload.model)) for workload in made]
    assert bits[0] == bits[1]
    np.testing.assert_array_equal(made[0].x, made[1].x)
    assert len(made[0].x) == 2 * network.batch


def test_the_largest_difference_is_a_part_of_the_largest_weight():
    stock = [np.array([1.0, -4.0]), np.array([0.01, 0.0])]
    ours = [np.array([1.5, -4.0]), np.array([0.0, 0.01])]
    assert models.largest_difference(ours, stock) == 0.125
    assert models.largest_difference(stock, stock) == 0.0
