"""A pytest plugin: ``Model.fit`` in Keras' own tests is a pipeline of two logical CPU devices.

Writes ``{test: [outcome, whether it trained, refusal]}`` as JSON to the file in ``TF_OOO_KERAS_OWN``.  With
``TF_OOO_KERAS_OWN_STOCK`` set the callback is left out, and all else is the same.  There are two
micro-batches, or as many as ``TF_OOO_KERAS_OWN_MICROBATCHES`` says.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest import mock

import keras
import pytest
import tensorflow as tf

import tf_ooo

if importlib.util.find_spec("jax") is None:
    sys.modules["jax"] = mock.MagicMock()  # Keras' tests import it, those of TensorFlow do not use it

STOCK = "TF_OOO_KERAS_OWN_STOCK" in os.environ
MICROBATCHES = int(os.environ.get("TF_OOO_KERAS_OWN_MICROBATCHES", "2"))
PIPELINE = {
    "mode": "pipeline",
    "devices": 2,
    "microbatches": MICROBATCHES,
    "schedule": "gpipe",
    "profile_steps": 0,
}
outcomes: dict[str, list] = {}
fits: list[bool] = []
refusals: list[str] = []


def pytest_configure(config):
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: Keras' own")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # ExampleModel of trainer_test.py is no keras.Model: only the trainer below is common to all.
    trainer = next(base for base in keras.Model.__mro__ if "fit" in vars(base))
    trainer.fit = _piped(trainer.fit)


def _piped(fit):
    @functools.wraps(fit)
    def piped(model, *arguments, callbacks=None, **named):
        fits.append(True)
        if STOCK:
            return fit(model, *arguments, callbacks=callbacks, **named)
        callback = tf_ooo.OOOBackprop(**PIPELINE, fall_back=False)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(callback)
        else:
            given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
            callbacks = [*given, callback]
        try:
            return fit(model, *arguments, callbacks=callbacks, **named)
        except tf_ooo.OOOError as error:
            refusals.append(str(error))
            raise

    return piped


@pytest.fixture(autouse=True)
def start():
    keras.utils.set_random_seed(1337)
    fits.clear()
    refusals.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call":
        said = refusals[0] if refusals else report.longreprtext[-600:]
        outcomes[f"{item.path.name}{item.nodeid[item.nodeid.index('::') :]}"] = [
            report.outcome,
            bool(fits),
            bool(refusals),
            said,
        ]


def pytest_sessionfinish():
    Path(os.environ["TF_OOO_KERAS_OWN"]).write_text(json.dumps(outcomes))
