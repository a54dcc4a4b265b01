"""Graphs that TensorFlow hands over in ``fit``, and what changes them: optimizers, precision, XLA inside.

Those of the models of the zoo: tests/graph/test_bit_equal.py.
"""

from __future__ import annotations

import keras
import pytest
from classification import check_fit, leaf_names

import tf_ooo
from tests import zoo, zoo_more
from tests.same_bits import BATCH_SIZE, PLAIN, recorded_rewrites
from tests.zoo import needs_keras_3


def fit(model, x, y):
    """TrainingGraph of the training step of one ``fit``."""
    if zoo.KERAS_3:
        zoo.make_variables(model, x, y)
    with recorded_rewrites() as rewrites:
        model.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[tf_ooo.OOOBackprop(**PLAIN)])
    return check_fit(model, rewrites)


@pytest.mark.parametrize("name", ["lstm_gru", "mlp"])
def test_mixed_precision(name):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        fit(*zoo.compiled(zoo.SMALL[name]))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(
    "optimizer", zoo.optimizers("sgd", "momentum", "global_clip_norm", "loss_scale", "accumulation")
)
@pytest.mark.parametrize("build", [zoo.convolutions, zoo_more.only_a_kernel])
def test_optimizers(build, optimizer):
    fit(*zoo.compiled(build, optimizer))


def test_state_of_an_optimizer_is_no_weight():
    """Nadam's product of decays is trainable by name."""
    keras.utils.set_random_seed(7)
    model, x, y = zoo.mlp()
    model.compile("nadam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    callback = tf_ooo.OOOBackprop(**PLAIN)
    model.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[callback])
    assert callback.report.unclassified == {}
    assert callback.report.moved_ops > 0


def test_a_loss_op_that_hands_out_its_gradient():
    """For a sum over rows the gradient is the loss op's second output, as it is."""
    keras.utils.set_random_seed(7)
    model, x, y = zoo.mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile("sgd", loss, jit_compile=False)
    graph = fit(model, x, y)
    assert len(graph.layers) == sum(bool(layer.weights) for layer in model.layers)


@needs_keras_3
def test_kernel_and_bias_of_a_convolution_that_xla_compiles():
    """Keras has XLA compile convolutions in groups: one call computes dO and the kernel's gradient."""
    graph = fit(*zoo.compiled(grouped_convolution))
    assert leaf_names(graph) == [["bias", "kernel"]] * 3
    assert any("jit_compile" in reason for reason in graph.mixed.values())


def grouped_convolution():
    return zoo.stack(
        zoo.features(9, 9, 3),
        keras.layers.Conv2D(6, 3, activation="gelu"),
        keras.layers.Conv2D(4, 3, groups=2, activation="gelu"),
        keras.layers.GlobalAveragePooling2D(),
    )
