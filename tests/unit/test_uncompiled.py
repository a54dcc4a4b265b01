"""``jit_compile=True`` that Keras may have set by itself."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tests.zoo import KERAS_3
from tf_ooo.compat import train_function
from tf_ooo.fit.life import NOTE, Uncompiled
from tf_ooo.report.report import Report


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", jit_compile=True)
    return made


@pytest.fixture
def gpu(monkeypatch):
    devices = [SimpleNamespace(device_type=kind) for kind in ("CPU", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: devices)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 compiles with XLA only where it is asked to")
def test_set_aside_and_put_back(gpu):
    one, aside, report = model(), Uncompiled(), Report(mode="pipeline")
    aside.set_aside(one)
    aside.note_in(report)
    aside.note_in(report)
    assert one.jit_compile is False
    assert report.notes == [NOTE]
    aside.put_back()
    aside.put_back()
    assert one.jit_compile is True


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 compiles with XLA only where it is asked to")
def test_not_put_back_over_a_later_compile(gpu):
    one, aside = model(), Uncompiled()
    aside.set_aside(one)
    one.compile("sgd", "mse", jit_compile=False)
    aside.put_back()
    assert one.jit_compile is False


def test_on_cpus_it_is_the_users_wish(monkeypatch):
    devices = [SimpleNamespace(device_type="CPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: devices)
    one, aside, report = model(), Uncompiled(), Report(mode="pipeline")
    assert not train_function.keras_compiles_by_itself(one)
    aside.set_aside(one)
    aside.note_in(report)
    assert one.jit_compile is True
    assert report.notes == []
