"""Some Keras are supported, and each object is of one."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.graph.compat_models import dense_model
from tests.zoo import KERAS_3, keras
from tf_ooo.compat import versions
from tf_ooo.errors import BackendError


def test_check_versions(monkeypatch):
    versions.check_versions()
    for version in ("2.14.1", "2.22.0-rc1"):
        monkeypatch.setattr(tf, "__version__", version)
        with pytest.raises(BackendError, match=f"TensorFlow {version} is not supported; pip install"):
            versions.check_versions()


def test_check_keras_backend(monkeypatch):
    versions.check_keras_backend()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(BackendError, match="set KERAS_BACKEND=tensorflow"):
        versions.check_keras_backend()
    monkeypatch.setattr(keras, "__version__", "2.14.0")
    with pytest.raises(BackendError, match=r"Keras 2\.14\.0 is not supported"):
        versions.check_keras_backend()


def test_which_keras_an_object_is_of():
    model = dense_model()
    for value in (model, model.layers[0], model.optimizer):
        assert versions.keras_of(value) is keras is versions.user_keras()
        assert versions.is_of_keras_2(value) is versions.is_keras_2(keras) is not KERAS_3
    assert keras in versions.loaded_keras()
