"""A pipeline refuses these, each with its error, the weights as they were; on three logical devices."""

from __future__ import annotations

import re

import pytest

from tests.graph.pipeline_fits import assert_equal_bits, compiled_model, devices_here, pipelined
from tests.graph.pipeline_models import X, Y, adam, mlp
from tests.zoo import KERAS_3, keras
from tf_ooo.errors import BackendError, OptionsError

pytestmark = pytest.mark.devices(3)

# One layer has so many parts: it, and what stands behind its weights.
PARTS = 9 if KERAS_3 else 7
Crossentropy = keras.losses.SparseCategoricalCrossentropy


def one_layer():
    return keras.Sequential([keras.Input((7,)), keras.layers.Dense(3)])


def stateful():
    parts = [keras.layers.Reshape((1, 7)), keras.layers.LSTM(4, stateful=True), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((7,), batch_size=16), *parts])


def summed():
    return Crossentropy(from_logits=True, reduction="sum")


def unreduced():
    return Crossentropy(from_logits=True, reduction="none")


@pytest.mark.parametrize(
    ("make", "compiled", "options", "text"),
    [
        pytest.param(mlp, {"jit_compile": True}, {}, "jit_compile=True", id="xla"),
        pytest.param(mlp, {"run_eagerly": True}, {}, "run_eagerly=True", id="eager"),
        pytest.param(mlp, {"loss": summed}, {}, "reduction='sum'", id="sum"),
        pytest.param(mlp, {"loss": unreduced}, {}, "adds up rows", id="none"),
        pytest.param(stateful, {}, {}, "make it with stateful=False", id="stateful"),
        pytest.param(mlp, {}, {"devices": ["CPU:0", "CPU:7"]}, "there is no 'CPU:7'", id="device"),
        pytest.param(mlp, {}, {"devices": ["CPU:0", "CPU:0"]}, "named twice", id="same"),
        pytest.param(mlp, {}, {"devices": 4}, "devices=4: there are 3", id="many"),
    ],
)
def test_before_any_weight_has_changed(make, compiled, options, text):
    assert devices_here() == 3
    compiled = compiled | ({"loss": compiled["loss"]()} if callable(compiled.get("loss")) else {})
    model = compiled_model(make, adam, **compiled)
    model(X[:16])
    before = model.get_weights()
    with pytest.raises(BackendError, match=re.escape(text)):
        fit(model, **options)
    assert_equal_bits(before, model.get_weights())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param(
            {"schedule": "interleaved_1f1b", "chunks": 9},
            f"27 stages are more than the {PARTS} layers",
            id="layers",
        ),
        pytest.param(
            {"schedule": "modulo", "group": 9},
            f"group=9: {PARTS} layers make 1 groups, fewer than the 3 devices",
            id="group",
        ),
        pytest.param({"replicas": 2}, "replicas=2: 3 devices cannot be dealt out evenly", id="replicas"),
        pytest.param({"devices": "CPU:0,CPU:1"}, "write a list, ['CPU:0', 'CPU:1']", id="text"),
    ],
)
def test_options(options, text):
    model = compiled_model(one_layer, adam)
    with pytest.raises(OptionsError, match=re.escape(text)):
        fit(model, **options)


class NotWritten(keras.Model):
    """Has no weights before its first step, which raises."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(3)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        raise NotImplementedError("this step is not written")


def test_what_a_train_step_raises_is_told_as_in_stock_training():
    """Traced to make the weights, it came with ten lines of whose code it was."""
    said = []
    for callbacks in ([], [pipelined("gpipe")]):
        model = compiled_model(NotWritten, adam)
        with pytest.raises(NotImplementedError) as raised:
            model.fit(X, Y, batch_size=16, verbose=0, callbacks=callbacks)
        said.append(str(raised.value))
    if KERAS_3:  # Keras 2 converts steps itself
        assert said == ["this step is not written"] * 2


def fit(model, schedule="gpipe", **options):
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[pipelined(schedule, **options)])
