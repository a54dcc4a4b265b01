"""A worker that is lost while it trains, wherever that is: an error names it, and the model comes back."""

from __future__ import annotations

import signal
import threading
from unittest import mock

import keras
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed.cluster_models import (
    BATCHES,
    COSTS,
    calls_within_step,
    data,
    hosts_of,
    perceptron,
    pipeline,
    train,
)
from tests.distributed.clusters import (
    SHORT_SILENCE_S,
    NthCall,
    address_of,
    addresses,
    join,
    lose,
    raises_lost,
    workers,
)
from tests.same_bits import bits_of
from tf_ooo.compat import keras_variables
from tf_ooo.costs.profile import StepProfiler
from tf_ooo.hosts import cluster as cluster_module
from tf_ooo.hosts import speeds as runtime_link
from tf_ooo.hosts.cluster import connect
from tf_ooo.modes.pipeline import plans as pipeline_plans
from tf_ooo.modes.pipeline.first_batch import LaterBatches
from tf_ooo.rewriting import staged as rewriting
from tf_ooo.tracing.variables import Moved

# The wait for the error, also on a busy machine.
pytestmark = [pytest.mark.alone, pytest.mark.takes(60)]
KILLED_OR_SILENT = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])


# -- steps of the user's own --------------------------------------------------------------------------


def step_over(devices, function):
    """Products on each device in turn, which call a Python function of this process between them."""
    weights = []
    for device in devices:
        with tf.device(device):
            weights.append(tf.Variable(tf.eye(64)))

    @tf.function
    def step(x):
        for number in range(4 * len(devices)):
            with tf.device(devices[number % len(devices)]):
                x = tf.matmul(x, weights[number % len(devices)])
            if number == 5:
                with tf.device(devices[0]):
                    x = tf.ensure_shape(tf.numpy_function(function, [x], tf.float32), x.shape)
        return tf.reduce_sum(x)

    return step


@pytest.mark.parametrize(
    ("how", "when"),
    [
        (signal.SIGKILL, "step"),
        (signal.SIGKILL, "between"),
        (signal.SIGKILL, "tracing"),
        (signal.SIGSTOP, "step"),
        # TensorFlow registers the function there with Python's lock held.
        (signal.SIGSTOP, "tracing"),
    ],
)
def test_lost_worker_is_named(how, when):
    cluster = addresses(3)
    with workers(cluster, [1, 2]) as started:
        joined, calls, x = join(cluster, how), [], tf.ones((8, 64))

        def called(tensor):
            calls.append(1)
            if when == "step" and len(calls) == 2:
                lose(started[2], how)
            return tensor

        step = step_over(joined.devices, called)
        if when != "tracing":
            assert float(step(x)) == 8 * 64
        if when != "step":
            lose(started[2], how)
        with pytest.raises(tf.errors.OpError) as raised:
            step(x).numpy()
        with raises_lost(cluster, task=2):
            raise joined.explain(raised.value)
        with pytest.raises(tf_ooo.BackendError, match="train on from the last checkpoint in a new process"):
            connect(cluster)


# -- fit ----------------------------------------------------------------------------------------------


@KILLED_OR_SILENT
def test_worker_lost_in_a_step_of_a_fit_is_named(how):
    """In the first step of the second epoch."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        join(cluster, how)
        loss, steps = calls_within_step(BATCHES + 1, 1, lambda: lose(started[1], how))
        model = perceptron(loss)
        with raises_lost(cluster):
            train(model, [pipeline(cluster), steps])
        assert hosts_of(model) == ["localhost"]


@KILLED_OR_SILENT
def test_worker_lost_while_the_model_is_saved_is_named(how, tmp_path):
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        join(cluster, how)
        model = perceptron()
        lost = NthCall("on_epoch_end", 2, lambda: lose(started[1], how))
        names = (tmp_path / "model.keras", tmp_path / "model_{epoch}.keras")
        saving = [keras.callbacks.ModelCheckpoint(name) for name in names]
        with raises_lost(cluster):
            train(model, [pipeline(cluster), lost, *saving])
        assert hosts_of(model) == ["localhost"]
        # The checkpoint that was to be replaced is the one of the epoch before.
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "model_1.keras"]
        last, before = (keras.models.load_model(tmp_path / name) for name in ("model.keras", "model_1.keras"))
        assert bits_of(last) == bits_of(before)
        assert int(last.optimizer.iterations) == BATCHES


@KILLED_OR_SILENT
def test_worker_lost_before_the_weights_come_back_is_named(how):
    """Not a fit that ends as if nothing had happened, with some weights from before it."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        join(cluster, how)
        model = perceptron()
        lost = NthCall("on_train_end", 1, lambda: lose(started[1], how))
        with raises_lost(cluster):
            train(model, [lost, pipeline(cluster)])
        assert hosts_of(model) == ["localhost"]


def test_worker_lost_before_a_validation_with_late_gradients_is_named():
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        model = perceptron()
        late = tf_ooo.OOOBackprop(mode="layerpipe", devices=cluster, schedule="pipedream", costs=COSTS)
        lost = NthCall("on_test_begin", 2, lambda: lose(started[1], signal.SIGKILL))
        with raises_lost(cluster):
            train(model, [late, lost], validation_data=data())
        assert hosts_of(model) == ["localhost"]


@pytest.mark.parametrize(
    ("how", "method"), [(signal.SIGKILL, "on_test_batch_end"), (signal.SIGSTOP, "on_train_batch_end")]
)
def test_worker_lost_before_an_epochs_metrics_are_read_is_named(how, method):
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        join(cluster, how)
        model = perceptron()
        lost = NthCall(method, 2 * BATCHES, lambda: lose(started[1], how))
        validation = {"validation_data": data()} if method == "on_test_batch_end" else {}
        with raises_lost(cluster):
            train(model, [pipeline(cluster), lost], **validation)
        assert hosts_of(model) == ["localhost"]


# -- at any time --------------------------------------------------------------------------------------

EVENTS = {
    "profiling": (StepProfiler, "run_anyway", 1),
    "measuring the link": (runtime_link, "measure_overhead_s_per_byte", 1),
    "planning": (pipeline_plans, "make_mesh", 1),
    "moving": (keras_variables, "copy_on", 3),
    "moved": (Moved, "check_captures", 1),
    "tracing": (rewriting, "rewrite_step", 1),
    # Its weights are fetched for that, before the second step.
    "comparing": (LaterBatches, "check", 1),
}


MEASURED = ("profiling", "measuring the link")


def calling_before(owner, name, number, function):
    """A patch: at its call of that number, from 1, the function runs first."""
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            function()
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, call)


@pytest.mark.parametrize(
    ("event", "how"),
    [
        *((event, signal.SIGKILL) for event in EVENTS),
        *((event, signal.SIGSTOP) for event in ("tracing", "comparing")),
    ],
)
def test_worker_lost_at_any_time_is_named(event, how):
    """It is lost while the model is profiled, planned, moved and traced, and while a batch is compared."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        join(cluster, how)
        model = perceptron()
        measured = {"costs": None, "profile_steps": 1} if event in MEASURED else {}
        with (
            calling_before(*EVENTS[event], lambda: lose(started[1], how)),
            raises_lost(cluster),
        ):
            train(model, [pipeline(cluster, **measured)])
        assert hosts_of(model) == ["localhost"]


@pytest.mark.parametrize(
    ("how", "weights"), [(signal.SIGKILL, "stash"), (signal.SIGKILL, "ema"), (signal.SIGSTOP, "stash")]
)
def test_worker_lost_before_late_gradients_begin_is_named(how, weights):
    """Before the registers on it are made: the shape of what is on a lost worker is never known."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        join(cluster, how)
        model = perceptron()
        late = tf_ooo.OOOBackprop(
            mode="layerpipe", devices=cluster, schedule="pipedream", costs=COSTS, weights=weights
        )
        lost = NthCall("on_epoch_begin", 1, lambda: lose(started[1], how))
        with raises_lost(cluster):
            train(model, [lost, late])
        assert hosts_of(model) == ["localhost"]


def test_worker_killed_while_weights_are_written_is_named(tmp_path):
    cluster, file = addresses(2), tmp_path / "model.keras"
    with workers(cluster, [1]) as started:
        model = perceptron()
        last = model.layers[-1]
        # Two epochs: the second one's file is not finished.
        kills = calling_before(last, "save_own_variables", 2, lambda: lose(started[1], signal.SIGKILL))
        with kills, raises_lost(cluster):
            train(model, [pipeline(cluster), keras.callbacks.ModelCheckpoint(file)])
        assert hosts_of(model) == ["localhost"]
        assert int(keras.models.load_model(file).optimizer.iterations) == BATCHES


def test_worker_killed_beside_a_step_is_named():
    """From another thread, so that it hits anything from the batch's begin to the step's end."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        model = perceptron()
        thread = threading.Thread(target=lose, args=(started[1], signal.SIGKILL))
        with raises_lost(cluster):
            train(model, [pipeline(cluster), NthCall("on_train_batch_begin", BATCHES + 2, thread.start)])
        assert hosts_of(model) == ["localhost"]


# -- before it is joined ------------------------------------------------------------------------------


def test_a_worker_that_is_silent_is_not_waited_for_as_one_that_starts():
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        lose(started[1], signal.SIGSTOP)
        with pytest.raises(tf_ooo.BackendError, match=r"\(task 1\) is not there: something listens there"):
            connect(cluster, wait_s=1000.0, silence_s=SHORT_SILENCE_S)


@pytest.mark.parametrize("event", ["_join", "say_used"])
def test_worker_stopped_while_it_is_joined_is_named(event):
    """TensorFlow joins with Python's lock held, and tries again for ever."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        stopped = calling_before(cluster_module, event, 1, lambda: lose(started[1], signal.SIGSTOP))
        named = rf"lost worker {address_of(cluster, 1)} \(task 1\)"
        with stopped, pytest.raises(tf_ooo.BackendError, match=named):
            connect(cluster, silence_s=SHORT_SILENCE_S)
