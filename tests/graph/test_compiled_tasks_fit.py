"""Steps of a fit whose tasks XLA compiles train as those do that run op by op; on two logical devices."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.graph.pipeline_fits import Training, pipelined
from tests.graph.pipeline_models import EVEN, IMAGES, Y, mlp
from tests.zoo import keras, layers, needs_keras_3, needs_xla_streams

pytestmark = [pytest.mark.devices(2), needs_keras_3, needs_xla_streams, pytest.mark.takes(30)]


def convolutions():
    inputs = x = keras.Input((9, 9, 2))
    for width, stride in ((4, 1), (5, 2), (6, 1)):
        x = layers.Conv2D(width, 3, strides=stride, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def calls_of(graph_def):
    """The number of calls of each kind of task, and of functions."""
    names = [node.name for node in graph_def.node if node.op == "PartitionedCall"]
    assert all(name.startswith("ooo_task/") for name in names)
    kinds = Counter(name.split("/")[1].split("_")[0] for name in names)
    return kinds, len(graph_def.library.function)


@pytest.mark.parametrize(
    ("make", "data", "first"),
    [
        pytest.param(mlp, EVEN, "{}", id="mlp"),
        pytest.param(convolutions, (IMAGES, Y), "before {} (1)", id="convolutions"),
    ],
)
def test_they_train_alike(make, data, first):
    """The steps before the last are on one device, where they are taken apart and measured."""
    training = Training(make, lambda: keras.optimizers.SGD(0.1), data, epochs=1, metrics=None)
    names = [layer.name for layer in training.model.layers if layer.weights]
    stages = [first.format(names[0]), names[2]]  # two layers in each
    functions = {}
    for count in (2, 4):
        fitted = {}
        for compiled in (False, True):
            training._measured = None
            options = {"microbatches": count, "stages": stages, "compile_tasks": compiled}
            fitted[compiled] = training.piped(pipelined("1f1b", first_steps="whole", **options))
        kinds, functions[count] = calls_of(fitted[True].report.rewritten_graph)
        assert (kinds["F"], kinds["dO"]) == (2 * count, 2 * count), "a call for each task of each stage"
        assert calls_of(fitted[False].report.rewritten_graph) == (Counter(), 0)
        assert (
            f" in {kinds.total()} calls of {functions[count]} functions" in fitted[True].report.compiled_tasks
        )
        for was, now in zip(fitted[False].weights, fitted[True].weights, strict=True):
            np.testing.assert_allclose(now, was, rtol=1e-5, atol=1e-5 * np.abs(was).max())
    assert functions[2] == functions[4], "micro-batches have their functions together"
