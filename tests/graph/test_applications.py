"""Large models, each traced as seldom as possible: those of ``keras.applications`` and of KerasHub."""

from __future__ import annotations

import importlib.util

import pytest
from classification import check, check_fit

import tf_ooo
from tests import zoo
from tests.same_bits import Training, assert_trains_alike
from tf_ooo.compat import tf_functions

pytestmark = pytest.mark.takes(150)
TRANSFORMERS = ("BertBackbone", "GPT2Backbone")
# 20 steps; VGG16 has 33 million weights, of which each step writes all three times.
EPOCHS = {"MobileNetV3Small": 2, "VGG16": 1}


@pytest.fixture(scope="module")
def training(request):
    """The model of that name, trained in stock order."""
    name = request.param
    build = zoo.backbone if name in TRANSFORMERS else zoo.application
    return Training(lambda: zoo.compiled(lambda: build(name)), name, epochs=EPOCHS.get(name, 2))


needs_keras_hub = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="keras-hub is not installed"
)
TRAINED = pytest.mark.parametrize(
    "training",
    [
        *(pytest.param(name, marks=needs_keras_hub) for name in TRANSFORMERS),
        *(pytest.param(name, marks=pytest.mark.slow) for name in EPOCHS),
    ],
    indirect=True,
)


@TRAINED
def test_the_same_bits(training):
    assert_trains_alike(training, training.plain)


@TRAINED
def test_the_trace_of_the_stock_step_is_classified(training):
    (function, *_) = tf_functions.functions_of(training.model.train_function)
    (concrete,) = tf_functions.concrete_functions_of(function)
    check(tf_ooo.classify(concrete), len(training.model.trainable_variables))


@TRAINED
def test_the_graph_in_fit_is_classified(training):
    check_fit(training.model, training.plain.rewrites)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(zoo.APPLICATIONS) - set(EPOCHS)))
def test_traces_are_classified(name):
    model, x, y = zoo.compiled(lambda: zoo.application(name))
    check(tf_ooo.classify(zoo.traced_step(model, x, y)), len(model.trainable_variables))
