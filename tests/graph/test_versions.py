"""A TensorFlow that is not supported, Keras 2, and Keras 2 beside Keras 3 (``tf_keras``)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.compat import releases
from grappler_passes.plugin import loader
from tests import forked, processes, zoo
from tests.same_bits import assert_ordered
from tests.zoo import keras, needs_keras_3
from tf_ooo.compat import versions
from tf_ooo.hosts.ranks.base import SingleEngine
from tf_ooo.modes import replicated as replicated_fit
from tf_ooo.modes import table
from tf_ooo.modes.data_parallel import fit

pytestmark = pytest.mark.takes(60)

ROOT = Path(__file__).parents[2]
OUTSIDE = ["2.14.1", "2.22.0-rc1"]
HAS_TF_KERAS = importlib.util.find_spec("tf_keras") is not None


MODES = ["single_device", "pipeline", "layerpipe", "data_parallel"]


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(releases, "_said", set())


def trained(callbacks):
    model, x, y = zoo.compiled(zoo.mlp)
    losses = model.fit(x, y, batch_size=3, epochs=3, verbose=0, callbacks=callbacks).history["loss"]
    return [losses, *model.get_weights()]


def assert_equal(ours, stock):
    for a, b in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("version", OUTSIDE)
def test_unsupported_tensorflow_trains_on_in_stock_order(version, mode, monkeypatch, caplog):
    stock = trained([])
    calls = loader.python_calls()
    monkeypatch.setattr(tf, "__version__", version)
    schedule = "fast_forward" if mode == "single_device" else "auto"
    callback = tf_ooo.OOOBackprop(mode=mode, schedule=schedule)
    assert_equal(trained([callback]), stock)
    assert callback.report.fell_back
    assert callback.report.rewritten_graph is None
    assert loader.python_calls() == calls, "the plug-in was called"
    said = [record.getMessage() for record in caplog.records if record.name == "tf_ooo"]
    assert len(said) == 1
    assert f"TensorFlow {version} is not supported; pip install 'tensorflow>=2.15,<2.22'" in said[0]
    assert "\n" not in said[0]
    assert callback.report.fallback_reason in said[0]
    assert f"TensorFlow {version}," in callback.report.environment
    assert callback.report.model.startswith("sequential")
    again = tf_ooo.OOOBackprop(mode=mode)
    trained([again])
    assert again.report.fallback_reason == callback.report.fallback_reason
    assert len([record for record in caplog.records if record.name == "tf_ooo"]) == 1, "said once more"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("version", OUTSIDE)
def test_unsupported_tensorflow_strict(version, mode, monkeypatch):
    monkeypatch.setattr(tf, "__version__", version)
    with pytest.raises(tf_ooo.BackendError, match=re.escape(version)):
        trained([tf_ooo.OOOBackprop(mode=mode, strict=True)])


@pytest.mark.parametrize("mode", ["data_parallel", "pipeline"])
def test_unsupported_tensorflow_and_several_ranks_is_an_error(mode, monkeypatch):
    """Each rank would train a model of its own, silently."""
    ranks = SingleEngine()
    ranks.name, ranks.size = "horovod", 2
    for module in (fit, replicated_fit):
        monkeypatch.setattr(module, "choose_engine", lambda name: ranks)
    monkeypatch.setattr(table, "launched_with_workers", lambda: True)
    monkeypatch.setattr(tf, "__version__", OUTSIDE[0])
    more = {"replicas": 2} if mode == "pipeline" else {}
    with pytest.raises(tf_ooo.BackendError, match="not supported.*2 processes would train without averaging"):
        trained([tf_ooo.OOOBackprop(mode=mode, **more)])


def test_one_process_says_that_there_is_nothing_to_average():
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    assert_equal(trained([callback]), trained([]))
    assert callback.report.fell_back
    assert callback.report.fallback_reason == "one process: nothing to average"


IMPORTS = [
    "import grappler_passes.plugin",
    "import tf_ooo; tf_ooo.function",
    "import tf_ooo; tf_ooo.OOOBackprop",
]


# Each in a fork of one new Python, so that TensorFlow is started once and ours are not imported yet.
IMPORTING = """
import os, sys
import tensorflow as tf
tf.__version__ = "2.22.0"
for statement in sys.argv[1:]:
    print(f"STATEMENT {statement}", file=sys.stderr, flush=True)
    child = os.fork()
    if not child:
        exec(statement)
        sys.stderr.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, statement
"""


@pytest.fixture(scope="module")
def said_at_import():
    """The lines of each import on a machine with another TensorFlow."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IMPORTING, *IMPORTS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    parts = run.stderr.split("STATEMENT ")[1:]
    assert len(parts) == len(IMPORTS)
    return {part.splitlines()[0]: part.splitlines()[1:] for part in parts}


@pytest.mark.parametrize("statement", IMPORTS)
def test_one_line_at_import(statement, said_at_import):
    said = [line for line in said_at_import[statement] if "supported" in line]
    reason = "TensorFlow 2.22.0 is not supported; pip install 'tensorflow>=2.15,<2.22'"
    assert said == [f"nothing is rewritten: {reason}"]


def test_versions_outside_the_range_are_told_by_their_numbers(monkeypatch):
    for version, inside in [("2.15.0", True), ("2.21.3", True), ("2.9.1", False), ("2.100.0", False)]:
        monkeypatch.setattr(tf, "__version__", version)
        assert (releases.why_unsupported() is None) is inside, version


def test_unsupported_tensorflow_with_function_and_enabled(monkeypatch):
    weight = tf.Variable([1.0, 2.0])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x * weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    monkeypatch.setattr(tf, "__version__", OUTSIDE[0])
    decorated = tf_ooo.function(step, schedule="fast_forward")
    assert float(decorated(tf.ones(2))) == 5.0
    assert OUTSIDE[0] in decorated.report.fallback_reason
    with tf_ooo.enabled() as report:
        tf.function(step)(tf.ones(2))
    assert report.fell_back
    assert OUTSIDE[0] in report.fallback_reason


def test_report_names_the_keras_of_the_model():
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0)
    trained([callback])
    name = "Keras" if keras.__name__ == "keras" else "tf_keras"
    assert f"TensorFlow {tf.__version__}, {name} {keras.__version__}," in callback.report.environment


def test_keras_of():
    model, *_ = zoo.compiled(zoo.mlp)
    for value in (model, model.layers[0], model.optimizer):
        assert versions.keras_of(value) is keras
    assert keras in versions.loaded_keras()
    assert versions.is_keras_2(keras) is not zoo.KERAS_3


def test_tf_keras_that_is_not_installed_is_asked_for_without_its_tensorflow(monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    minor = ".".join(tf.__version__.split(".")[:2])
    with pytest.raises(tf_ooo.BackendError, match=re.escape(f"pip install --no-deps 'tf_keras=={minor}.*'")):
        versions.user_keras()


@needs_keras_3
@pytest.mark.skipif(not HAS_TF_KERAS, reason="tf_keras is not installed")
def test_tf_keras_model_without_the_environment_variable():
    """``import tf_keras`` beside Keras 3: one callback class for both."""
    import tf_keras

    def fit(callbacks):
        tf_keras.utils.set_random_seed(7)
        layers = [tf_keras.layers.Dense(9, activation="tanh"), tf_keras.layers.Dense(3)]
        model = tf_keras.Sequential([tf_keras.Input((7,)), *layers])
        model.compile("adam", "mse")
        x, y = zoo.features(7), zoo.features(3)
        losses = model.fit(x, y, batch_size=3, epochs=3, verbose=0, callbacks=callbacks).history["loss"]
        return [losses, *model.get_weights()]

    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=1, strict=True)
    assert_equal(fit([callback]), fit([]))
    assert_ordered(callback.report)
    assert callback.report.ops["dW"] == 6  # two in each layer, and the dO that only the first layer needs
    assert "tf_keras" in callback.report.environment


@needs_keras_3
@pytest.mark.skipif(not HAS_TF_KERAS, reason="tf_keras is not installed")
def test_legacy_keras_by_environment_variable(tmp_path):
    """``tf.keras`` is ``tf_keras`` for a whole process: the tests of equal bits once more."""
    chosen = "(mlp or convolutions or lstm_gru or momentum or custom_train_step) and not in_order"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "ignore", "-k", chosen,
               "tests/graph/test_bit_equal.py", "tests/graph/test_bit_equal_more.py"]  # fmt: skip
    environment = os.environ | {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=800)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = "\n".join(line for line in run.stdout.splitlines() if "PASSED" in line)
    for name in ("test_models[mlp]", "test_models[convolutions]", "test_models[lstm_gru]", "momentum"):
        assert name in passed, run.stdout
    assert "custom_train_step" in passed, run.stdout


def pipeline_of_tf_keras():
    """In a new Python: two devices and Adam, the same bits by two schedules, near the unsplit batch's."""
    processes.make_devices(2)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(52, 7)).astype("float32"), rng.integers(0, 3, 52)
    keras = zoo.keras
    assert keras.__name__.startswith("tf_keras") or "tf_keras" in keras.layers.Dense.__module__

    def train(*callbacks):
        """8 steps, the last of each epoch with fewer rows."""
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(33, "relu"), keras.layers.Dense(21, "gelu"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((7,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
        fit = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
        return model, fit.history["loss"]

    stock, stock_losses = train()
    weights = []
    for schedule in ("gpipe", "zb_h1"):
        callback = tf_ooo.OOOBackprop(mode="pipeline", schedule=schedule, devices=2, microbatches=4)
        model, losses = train(callback)
        weights.append(model.get_weights())
        np.testing.assert_allclose(losses, stock_losses, rtol=0, atol=1e-5)
        for ours, theirs in zip(weights[-1], stock.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        assert np.abs(weights[-1][-1]).max() > 1e-3, "the bias that starts at 0 was not trained"
        report = callback.report
        assert "tf_keras" in report.environment
        assert report.added_edges > 0
        assert report.moved_ops > 0
        nodes = report.rewritten_graph.node
        assert {n.device[-5:] for n in nodes if n.attr["_ooo_kind"].s == b"dW"} == {"CPU:0", "CPU:1"}
        assert {variable.device[-5:] for variable in model.variables} == {"CPU:0"}
    for one_schedule, other_schedule in zip(*weights, strict=True):
        np.testing.assert_array_equal(one_schedule, other_schedule)


@needs_keras_3
@pytest.mark.skipif(not HAS_TF_KERAS, reason="tf_keras is not installed")
def test_pipeline_of_tf_keras_by_environment_variable():
    forked.in_a_new_python(pipeline_of_tf_keras, TF_USE_LEGACY_KERAS="1")


@pytest.mark.skipif(not zoo.OLDER_XLA, reason="of TensorFlow before 2.21")
def test_compiled_steps_stay_as_they_are_in_an_older_tensorflow():
    """Streams need a newer XLA: the stock step trains, and the report says so."""
    weights = []
    for callbacks in ([], [tf_ooo.OOOBackprop()]):
        model, x, y = zoo.compiled(zoo.one_layer, jit_compile=True)
        model.fit(x, y, batch_size=3, epochs=2, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    assert_equal(*weights)
    report = callbacks[0].report
    assert report.fell_back
    assert "2.21 is needed" in report.fallback_reason
    model, x, y = zoo.compiled(zoo.one_layer, jit_compile=True)
    named = tf_ooo.OOOBackprop(schedule="multi_stream", strict=True)
    with pytest.raises(tf_ooo.BackendError, match=r"2\.21 is needed"):
        model.fit(x, y, verbose=0, callbacks=[named])
