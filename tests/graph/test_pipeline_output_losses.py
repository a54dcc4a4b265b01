"""Losses of several outputs in the logs are those of stock, also where the last batch is smaller."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.pipeline_fits import pipelined
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(2), needs_keras_3]

X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")


def history(*callbacks):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(hidden) for name in "ab"])
    model.compile("adam", ["mse", "mae"])
    y = (X[:, :1], X[:, 1:2])
    return model.fit(
        X, y, batch_size=7, epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks)
    ).history


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_smaller_last_batch_counts_as_in_stock(microbatches):
    stock = history()
    ours = history(pipelined("zb_h1", devices=2, microbatches=microbatches, profile_steps=1))
    assert stock.keys() == ours.keys()
    for name, values in stock.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5, err_msg=name)
