"""A pytest plugin for Keras' own tests, which train as ``TF_OOO_KERAS_OWN`` says.

``rewritten``: the strict ``tf_ooo.enabled()`` is around each test.  ``pipeline``: each ``Model.fit`` is one
of two logical CPU devices and two micro-batches.  ``stock``: it has no callback, all else is the same.  The
file in ``TF_OOO_KERAS_OWN_RESULTS`` gets ``{test: [outcome, whether it trained, whether refused, text]}``.
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

import tf_ooo
from tests.processes import make_devices

if importlib.util.find_spec("jax") is None:
    sys.modules["jax"] = mock.MagicMock()  # Keras' tests import it, those of TensorFlow do not use it

WAY, RESULTS = os.environ["TF_OOO_KERAS_OWN"], os.environ.get("TF_OOO_KERAS_OWN_RESULTS")
PIPELINE = {"mode": "pipeline", "devices": 2, "microbatches": 2, "schedule": "gpipe", "profile_steps": 0}
outcomes: dict[str, list] = {}
fits: list[bool] = []
refusals: list[str] = []
rewritten: list[str] = []


def pytest_configure(config):
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: Keras' own")
    if WAY != "rewritten":
        make_devices(2)
        # ExampleModel of trainer_test.py is no keras.Model: only the trainer below is common to all.
        trainer = next(base for base in keras.Model.__mro__ if "fit" in vars(base))
        trainer.fit = _piped(trainer.fit)


def _piped(fit):
    @functools.wraps(fit)
    def piped(model, *arguments, callbacks=None, **named):
        fits.append(True)
        if WAY == "stock":
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
def start(request):
    keras.utils.set_random_seed(1337)
    fits.clear()
    refusals.clear()
    if WAY != "rewritten":
        yield
        return
    with tf_ooo.enabled(tf_ooo.Options(strict=True)) as report:
        yield
    if report.rewritten_graph is not None:
        rewritten.append(request.node.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call":
        said = refusals[0] if refusals else report.longreprtext[-600:]
        name = f"{item.path.name}{item.nodeid[item.nodeid.index('::') :]}"
        outcomes[name] = [report.outcome, bool(fits), bool(refusals), said]


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"rewritten in {len(rewritten)} tests")


def pytest_sessionfinish():
    if RESULTS:
        Path(RESULTS).write_text(json.dumps(outcomes))
