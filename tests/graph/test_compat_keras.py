"""One test per function of tf_ooo/compat/ that is another in Keras 2 and in Keras 3."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import shape_inference
from tests.zoo import KERAS_3, keras, loss_scaling
from tf_ooo.compat import keras_fits, keras_optimizers, train_function
from tf_ooo.compat.callbacks import Callback

X, Y = np.ones((12, 3), "float32"), np.ones((12, 2), "float32")


def dense(optimizer="adam", **options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", **options)
    return model


def test_step_on_data():
    """As the train function of ``fit``: the same weights, and Keras 2 counts the step."""
    one, two = dense("sgd"), dense("sgd")
    two.set_weights(one.get_weights())
    one.fit(X, Y, batch_size=12, verbose=0)
    logs = tf.function(train_function.step_on_data(two, two.train_step))((tf.constant(X), tf.constant(Y)))
    assert "loss" in logs
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    if not KERAS_3:
        assert int(two._train_counter) == 1, "BackupAndRestore and TensorBoard count steps by it"


def test_new_train_function_of_another_step():
    """It is made of the wrapped step whenever it is traced; the model's own is back after each call."""
    model, calls = dense("sgd"), []

    def wrap(train_step):
        def step(data):
            calls.append(data)
            return train_step(data)

        return step

    function = train_function.new_train_function(model, wrap)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    assert "loss" in function(iter(data))
    traced = len(calls)
    assert traced > 0, "Keras does not trace the step that it was given"
    assert "train_step" not in vars(model)
    model.fit(X, Y, batch_size=6, verbose=0)
    assert len(calls) == traced


def test_steps_per_execution():
    assert train_function.steps_per_execution(dense()) == 1
    model = dense(steps_per_execution=4)
    assert train_function.steps_per_execution(model) == 4
    seen = []
    step = model.make_train_function()
    step = step or model.train_function
    with train_function.steps_per_execution_set_to(model, 2):
        seen.append(train_function.steps_per_execution(model))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
        step(iter(data))  # two batches: in Keras 2 the end of the data would be an error
    assert seen == [4 if KERAS_3 else 2]
    assert train_function.steps_per_execution(model) == 4


@pytest.mark.parametrize("epoch", [0, 2])
def test_set_start_epoch(epoch):
    class Note(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            keras_fits.set_start_epoch(self.model, epoch)
            # In Keras 2 fit's own question is answered, which may be asked once.
            assert not KERAS_3 or keras_fits.start_epoch_of(self.model) == epoch

        def on_epoch_begin(self, number, logs=None):
            seen.append(number)

    model, seen = dense(), []
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[Note()])
    assert seen == list(range(epoch, 3)), "fit begins with another epoch than BackupAndRestore asks for"
    if not KERAS_3:
        assert "_maybe_load_initial_counters_from_ckpt" not in vars(model)


def test_samples_seen():
    model = dense()
    model.fit(X, Y, batch_size=5, verbose=0)
    assert keras_fits.samples_seen(model) == 12.0, "the loss is averaged over samples"


def legacy():
    return keras.optimizers.legacy.Adam(0.01)


KINDS = [lambda: keras.optimizers.Adam(0.01), lambda: loss_scaling()(keras.optimizers.SGD(0.1, momentum=0.9))]


@pytest.mark.parametrize("make", KINDS if KERAS_3 else [*KINDS, legacy])
def test_optimizers(make):
    """Found, built, its state known, and what it is given can be changed."""
    model = dense(make())
    optimizer = model.optimizer
    assert keras_optimizers.is_optimizer(optimizer)
    keras_optimizers.build_optimizer(optimizer, model.trainable_variables)
    state = keras_optimizers.state_of(optimizer)
    assert len(state) >= 1 + len(model.trainable_variables), "slots are missing: they would not be broadcast"
    keras_optimizers.build_optimizer(optimizer, model.trainable_variables)
    assert [id(v) for v in keras_optimizers.state_of(optimizer)] == [id(v) for v in state]
    given = []

    def make_update(apply):
        def update(grads, trainable_variables=None):
            given.extend(grads)
            return apply([tf.zeros_like(g) for g in grads], trainable_variables)

        return update

    before = model.get_weights()
    keras_optimizers.shadow_update(optimizer, make_update)
    model.train_on_batch(X, Y)
    keras_optimizers.unshadow_update(optimizer)
    assert len(given) == 2, "updates no longer go through apply or apply_gradients: nothing is averaged"
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not {"apply", "apply_gradients"} & set(vars(optimizer))


def test_inner_optimizers():
    inner = keras.optimizers.SGD(0.1)
    assert keras_optimizers.inner_optimizers(inner) == []
    assert keras_optimizers.inner_optimizers(loss_scaling()(inner)) == [inner]


def test_callback_is_asked_for_the_batches_that_it_wants():
    class Epochs(Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(("epoch", sorted(logs)))

    class Batches(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    seen = []
    dense().fit(X, Y, batch_size=6, verbose=0, callbacks=[Epochs(), Batches()])
    assert seen == [0, 1, ("epoch", ["loss"])]
    asked = [Epochs()._implements_train_batch_hooks(), Batches()._implements_train_batch_hooks()]
    assert asked == [False, True]


def test_odd_graphs_are_readable():
    """What TensorFlow 2.15 makes of a batch normalization with Relu, for a number of channels that is no
    multiple of 4."""
    graph_def = tf.compat.v1.GraphDef()
    shape = tf.TensorShape([2, 4, 4, 5]).as_proto()
    for name, dims in (("x", shape), *((n, tf.TensorShape([5]).as_proto()) for n in "abcd")):
        node = graph_def.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tf.float32.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(dims)
    norm = graph_def.node.add(name="norm", op="_FusedBatchNormEx", input=["x", "a", "b", "c", "d", "^a"])
    for name in "TU":
        norm.attr[name].type = tf.float32.as_datatype_enum
    norm.attr["num_side_inputs"].i, norm.attr["activation_mode"].s = 0, b"Relu"
    outputs = shape_inference.infer_outputs(graph_def)
    assert outputs["norm"][0].shape == (2, 4, 4, 5)
    assert outputs["norm"][1].shape == (5,)
    assert graph_def.node[-1].op == "_FusedBatchNormEx", "the graph itself must stay as it is"
