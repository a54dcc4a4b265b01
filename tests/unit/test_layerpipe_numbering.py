"""Tests which layer of a step given costs are of."""

from __future__ import annotations

import pytest

from tf_ooo.modes.layerpipe.planning import in_order_of


@pytest.mark.parametrize(
    ("costs", "layers", "expected"),
    [
        (["stem", "shortcut", "block"], ["stem", "block", "shortcut"], [0, 2, 1]),
        # Keras goes on counting when a model is made again.
        (["conv2d", "conv2d_2", "conv2d_1"], ["conv2d_9", "conv2d_10", "conv2d_11"], [0, 2, 1]),
        (["conv2d_1/kernel", "dense/kernel"], ["dense_4/kernel", "conv2d_6/kernel"], [1, 0]),
        # Variables of one layer without a common name stand in any order.
        (["b", "k_1, k"], ["k, k_1", "b"], [1, 0]),
        # Made up by hand, or of other layers: by their places.
        (["0", "1", "2"], ["a", "b", "c"], [0, 1, 2]),
        (["", ""], ["a", "b"], [0, 1]),
        (["a", "a"], ["b", "a"], [0, 1]),
        (["a"], ["a", "b"], [0, 1]),
    ],
)
def test_layers_are_found_by_their_names(costs, layers, expected):
    assert in_order_of(costs, layers) == expected
