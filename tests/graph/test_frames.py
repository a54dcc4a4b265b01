"""A refusal's traceback has the user's lines and the advice; those between are there when asked for."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.zoo import keras
from tf_ooo.errors import BackendError, OOOError, OptionsError
from tf_ooo.fit.guard import in_short

pytestmark = pytest.mark.devices(2)
PACKAGES = ("tf_ooo", "keras_callbacks", "grappler_passes")
X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def _fit(callback, loss="mse"):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])


def _added_up(y, p):
    return tf.reduce_sum((y - p) ** 2)


def _lines_of_ours(raised):
    return [frame.name for frame in traceback.extract_tb(raised.value.__traceback__) if _is_ours(frame)]


def _is_ours(frame):
    return any(
        f"/{package}/" in frame.filename for package in ("tf_ooo", "keras_callbacks", "grappler_passes")
    )


def _refusals():
    with pytest.raises(OptionsError) as of_options:
        tf_ooo.OOOBackprop(schedule="nonsense")
    with pytest.raises(BackendError) as of_devices:
        _fit(tf_ooo.OOOBackprop(mode="pipeline", devices=7))
    with pytest.raises(BackendError, match="adds up rows") as of_step:
        _fit(tf_ooo.OOOBackprop(mode="pipeline", devices=2, microbatches=2), _added_up)
    return of_options, of_devices, of_step


def test_a_refusal_has_the_users_lines():
    for raised in _refusals():
        assert len(_lines_of_ours(raised)) <= 1, "the call that Keras or the user makes"
        assert raised.value.__cause__ is None


def test_all_lines_are_there_when_asked_for():
    tf.debugging.disable_traceback_filtering()
    try:
        assert all(len(_lines_of_ours(raised)) > 3 for raised in _refusals())
    finally:
        tf.debugging.enable_traceback_filtering()


def test_a_fault_of_ours_keeps_its_lines():
    with pytest.raises(ZeroDivisionError) as raised:
        _raise(ZeroDivisionError())
    before = len(traceback.extract_tb(raised.value.__traceback__))
    assert in_short(raised.value) is raised.value
    assert len(traceback.extract_tb(raised.value.__traceback__)) == before


def test_lines_of_the_user_within_stay():
    """A loss function of the user's that calls what refuses."""
    with pytest.raises(OOOError) as raised:
        _raise(OOOError("said"))
    in_short(raised.value)
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names == ["test_lines_of_the_user_within_stay", "_raise"]


def _raise(error):
    raise error
