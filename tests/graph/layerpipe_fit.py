"""Models, data and callbacks for fits with ``mode="layerpipe"``, which several test files share."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import tensorflow as tf

import tf_ooo
from tests.graph.layerpipe_by_hand import data
from tests.graph.layerpipe_spread import fit_spread
from tests.zoo import KERAS_3, keras
from tf_ooo.compat import keras_variables
from tf_ooo.costs.table import CostTable

PICTURES = (12, 12, 2)
BATCH = 16


def samples(count=72):
    """The last batch is smaller than the others."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, *PICTURES)).astype(np.float32)
    return x, (x.mean((1, 2, 3)) > 0).astype(np.int32)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def convnet(optimizer="sgd", dropout=0.2):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(PICTURES)
    x = keras.layers.Conv2D(5, 3, padding="same", activation="relu")(inputs)
    skip = x
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(5, 3, padding="same")(x))
    # Keras 2's Dropout draws from a state that each function has of its own: fits do not go on with masks.
    x = keras.layers.Dropout(dropout if KERAS_3 else 0.0)(keras.layers.add([x, skip]))
    x = keras.layers.Dense(7, activation="relu")(keras.layers.Flatten()(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile(optimizer, crossentropy(), metrics=["accuracy"], jit_compile=False)
    return model


def with_momentum():
    """Without dropout: Keras does not save the state of its masks."""
    return convnet(keras.optimizers.SGD(0.01, momentum=0.9), dropout=0.0)


def gelus():
    """Gradients of what follows a layer belong to it: gelu's, a mask's, normalization's."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input(PICTURES)
    x = keras.layers.Flatten()(inputs)
    for width in (13, 11, 7):
        x = keras.layers.Dropout(0.1)(keras.layers.Dense(width, activation="gelu")(x))
        x = keras.layers.BatchNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile("sgd", crossentropy(), metrics=["accuracy"], jit_compile=False)
    return model


def shortcuts():
    """Blocks with shortcuts, whose convolutions graph optimizers order otherwise than the trace."""
    # TensorFlow's oneDNN gets some gradients of 1x1 kernels wrong on CPUs without AVX-512: these are 2 wide.
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input(PICTURES)
    for width in (4, 6):
        y = keras.layers.Conv2D(width, 2, strides=2, use_bias=False)(x)
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
        y = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
        y = keras.layers.BatchNormalization()(y)
        x = keras.layers.Conv2D(width, 2, strides=2, use_bias=False)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(keras.layers.Concatenate()([x, y]))  # a sum would make one layer of the two
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    model.compile("sgd", crossentropy(), jit_compile=False)
    return model


def fitted(model, callback, epochs=1, more=(), rows=None, **arguments):
    """An ordinary fit: with an error, or on one device."""
    x, y = (part[:rows] for part in samples())
    given = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0} | arguments
    return model.fit(x, y, callbacks=[callback, *more], **given).history


def fitted_spread(model, callback, epochs=1, more=(), rows=None, **arguments):
    """The history of a fit that is spread over devices, which is asserted."""
    x, y = (part[:rows] for part in samples())
    given = {"batch_size": BATCH, "epochs": epochs, "shuffle": False} | arguments
    return fit_spread(model, callback, x, y, callbacks=more, **given)


# Devices have cores of their own: plans are the same on machines with few cores and with many.
OWN_CORES = tf_ooo.Link(30e-6)


def costs_of(layers):
    """Costs under which every layer is worth a processor."""
    return CostTable([tf_ooo.LayerCosts(1.0, 1.2, 0.9, name=str(n)) for n in range(layers)], OWN_CORES)


def layerpipe(devices=3, layers=5, **options):
    """Layers may be divided, whether or not that is predicted to gain much."""
    given = {"schedule": "layerpipe", "costs": costs_of(layers)} | options
    return tf_ooo.OOOBackprop(mode="layerpipe", devices=devices, **given)


def over_four(**options):
    """For models of four layers, on four devices: gradients are 6, 4, 2 and 0 steps late."""
    costs = CostTable([tf_ooo.LayerCosts(1.0, 1.0, 1.0) for _ in range(4)], OWN_CORES)
    given = {"costs": costs, "schedule": "pipedream"} | options
    return tf_ooo.OOOBackprop(mode="layerpipe", devices=4, **given)


def batches_of(x, y):
    """A data set of batches with unequal numbers of rows."""
    return tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=tuple(tf.TensorSpec([None, part[0].shape[1]]) for part in (x, y)),
    )


def perceptron_batches():
    return batches_of(*data())


def trained_weights(model):
    return [v.numpy() for v in model.trainable_variables]


def state_of(model):
    """All that training changes: weights, moving statistics, and the optimizer's variables."""
    return [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]


def updates_of(model):
    return int(model.optimizer.iterations.numpy())


def places(model):
    """The devices that a model's and its optimizer's variables are on."""
    return {keras_variables.value_of(v).device[-5:] for v in (*model.variables, *model.optimizer.variables)}


class Saves(keras.callbacks.Callback):
    """Takes the weights after a batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch, self.weights, self.seen = batch, None, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.batch:
            self.take()

    def take(self):
        """The weights, and of how many batches they have the updates."""
        self.weights = trained_weights(self.model)
        self.updates = updates_of(self.model)


class SavesFile(Saves):
    """Writes a checkpoint after that batch."""

    def __init__(self, batch, file):
        super().__init__(batch)
        self.file = file

    def take(self):
        self.model.save(self.file)


class SavesEpoch(keras.callbacks.Callback):
    """Saves the model at the end of the first epoch."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_epoch_end(self, epoch, logs=None):
        if not epoch:
            self.model.save(self.file)


def reloaded(model):
    """Return the model as it comes from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.keras")
        model.save(file)
        return keras.models.load_model(file)
