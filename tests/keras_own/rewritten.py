"""A pytest plugin, for test_keras_own.py: ``tf_ooo.enabled()`` around every test, strict."""

from __future__ import annotations

import importlib.util
import sys
from unittest import mock

import keras
import pytest

import tf_ooo

if importlib.util.find_spec("jax") is None:
    sys.modules["jax"] = mock.MagicMock()  # Keras' tests import it, those of TensorFlow do not use it

rewritten: list[str] = []


def pytest_configure(config):
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: Keras' own")


@pytest.fixture(autouse=True)
def enabled(request):
    keras.utils.set_random_seed(1337)
    with tf_ooo.enabled(tf_ooo.Options(strict=True)) as report:
        yield
    if report.rewritten_graph is not None:
        rewritten.append(request.node.nodeid)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"rewritten in {len(rewritten)} tests")
