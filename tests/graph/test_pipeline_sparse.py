"""Rows of weights that sparse inputs look up come once for a batch, as in stock training."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import pipelined
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(2), needs_keras_3]

RNG = np.random.default_rng(0)
X = (RNG.random((36, 12)) > 0.7).astype("float32")
Y = RNG.normal(size=(36, 2)).astype("float32")


class OfUniqueRows(keras.layers.Layer):
    """Looks each row of its table up once, as large vocabularies are."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, 4), name="table")

    def call(self, x):
        ids, places = tf.unique(tf.reshape(tf.argsort(x)[:, -3:], [-1]))
        rows = tf.gather(tf.gather(tf.convert_to_tensor(self.table), ids), places)
        return tf.reshape(rows, [-1, 12])


def sparse_dense():
    inputs = keras.Input((12,), sparse=True)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(5, "relu")(inputs)))


def unique_rows():
    inputs = keras.Input((12,))
    return keras.Model(inputs, keras.layers.Dense(2)(OfUniqueRows()(inputs)))


MODELS = {
    "sparse": (sparse_dense, lambda: tf.sparse.from_dense(X)),
    "unique": (unique_rows, lambda: X),
}


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "adagrad", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_come_once(name, optimizer, microbatches):
    make, inputs = MODELS[name]
    trained = []
    for callbacks in ([], [pipelined("zb_h1", devices=2, microbatches=microbatches)]):
        keras.utils.set_random_seed(1)
        model = make()
        settings = {"clipnorm": 0.1} if optimizer == "sgd" else {}
        kind = {"adam": "Adam", "rmsprop": "RMSprop", "adagrad": "Adagrad", "sgd": "SGD"}[optimizer]
        model.compile(getattr(keras.optimizers, kind)(**settings), "mse", jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices((inputs(), Y)).batch(12)
        model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        trained.append(model.get_weights())
    for stock, parts in zip(*trained, strict=True):
        np.testing.assert_allclose(parts, stock, rtol=1e-4, atol=1e-6)
