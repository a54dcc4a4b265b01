"""Variables that stand on other devices, and come back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.compat_models import normalized_model
from tf_ooo.compat import keras_variables
from tf_ooo.tracing import variables
from tf_ooo.tracing.variables import Moved


def test_functions_are_put_away_and_come_back():
    made = normalized_model()
    made.predict(np.ones((2, 3)), verbose=0)
    function = made.predict_function
    moved = Moved(made)
    moved.move({}, [])
    assert made.predict_function is None
    assert moved.restore() == []
    assert made.predict_function is function


def test_moved_variables_come_back_with_their_new_values():
    """And go to the same copies again: functions that were traced with those read the present values."""
    made = normalized_model()
    kernel = made.trainable_variables[0]
    old = keras_variables.value_of(kernel)
    moved, devices = Moved(made), {id(kernel): "/job:localhost/replica:0/task:0/device:CPU:00"}
    moved.move(devices, made.variables)
    away = keras_variables.value_of(kernel)
    assert away is not old
    kernel.assign(np.full((3, 4), 7.0))
    moved.restore()
    assert keras_variables.value_of(kernel) is old
    assert (old.numpy() == 7).all()
    assert away.numpy().size == 0  # its memory is free: graphs may keep the variable
    kernel.assign(np.full((3, 4), 8.0))
    moved.move(devices, made.variables)
    assert keras_variables.value_of(kernel) is away
    assert (away.numpy() == 8).all()
    moved.restore()
    assert (old.numpy() == 8).all()


def test_who_interrupts_variables_on_their_way_back_may_go_on(monkeypatch):
    made = normalized_model()
    weights = made.trainable_variables
    old = [keras_variables.value_of(v) for v in weights]
    moved, device = Moved(made), "/job:localhost/replica:0/task:0/device:CPU:00"
    moved.move({id(v): device for v in weights}, weights)
    for variable in weights:
        variable.assign(np.full(variable.shape, 7.0))
    take, seen = variables._taken, []

    def interrupted(*args):
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return take(*args)

    monkeypatch.setattr(variables, "_taken", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moved.restore()
    assert all((v.numpy() == 7).all() for v in weights)
    assert moved.restore() == []
    assert all((v.numpy() == 7).all() for v in weights)
    assert all(keras_variables.value_of(v) is one for v, one in zip(weights, old, strict=True))
