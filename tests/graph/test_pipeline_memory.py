"""A limit of memory, what is said about it, and the files about it, on two logical devices."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.graph.dependencies import GraphIndex
from tests.graph.pipeline_fits import Training, assert_equal_bits, assert_same_bits, fits_of, pipelined
from tests.graph.pipeline_graphs import assert_in_order
from tests.graph.pipeline_models import EVEN, X, Y, adam, mlp, momentum
from tests.zoo import keras, needs_keras_3
from tf_ooo.units import bytes_text

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(20)]


def tiled(count):
    return np.tile(X, (count, 1)), np.tile(Y, count)


@pytest.fixture(scope="module")
def training():
    return Training(mlp, adam, tiled(32), batch_size=768, epochs=4)


@pytest.fixture(scope="module")
def limited(training, tmp_path_factory):
    """Activations of eight micro-batches are too much, those of three are not."""
    free = training.piped(pipelined("gpipe", microbatches=8))
    limit = int(0.72 * max(free.report.pipeline["predicted_peak_bytes"]))
    folder = tmp_path_factory.mktemp("timeline")
    callback = pipelined("auto", microbatches=8, memory_limit_bytes=limit, timeline=folder)
    # Measured again: the rows of its micro-batches are counted then.
    fitted = training.piped(callback, measured_before=False)
    return SimpleNamespace(free=free, limit=limit, folder=folder, callback=callback, fitted=fitted)


def peaks(callback):
    return callback.report.pipeline["predicted_peak_bytes"]


def test_another_schedule_stays_within_the_limit(limited):
    report = limited.fitted.report
    assert report.schedule != "gpipe"
    assert max(report.pipeline["predicted_peak_bytes"]) <= limited.limit
    assert_equal_bits(limited.free.weights, limited.fitted.weights)
    assert_in_order(limited.free.report, 2)
    assert_in_order(report, 2)


def test_the_files_draw_all_tasks(limited):
    files = sorted(path.name for path in limited.folder.iterdir())
    assert files == ["plotly.min.js", "plugins", "report.html", "trace.json"]
    events = json.loads((limited.folder / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tasks = [event for event in events if event.get("cat") in ("F", "dO", "dW", "U")]
    drawn = sum(names[event["pid"]].startswith("planned: ") for event in tasks)
    assert drawn == len(limited.callback.report.planned.tasks) > 0


def test_larger_batches_are_planned_anew_or_refused(training, limited):
    before = peaks(limited.callback)

    def fit(count):
        x, y = tiled(32 * count)
        settings = {"batch_size": 768 * count, "verbose": 0, "shuffle": False}
        training.model.fit(x, y, callbacks=[limited.callback], **settings)

    try:
        fit(2)
    except tf_ooo.MemoryLimitError:
        pass
    else:
        assert max(peaks(limited.callback)) <= limited.limit
    assert peaks(limited.callback) != before
    with pytest.raises(tf_ooo.MemoryLimitError):
        fit(64)


def test_a_limit_that_no_schedule_keeps(training):
    with pytest.raises(tf_ooo.MemoryLimitError) as refused:
        training.piped(pipelined("auto", microbatches=8, memory_limit_bytes=10_000))
    assert refused.value.smallest_bytes > 10_000


def test_each_device_keeps_a_limit_of_its_own(training, limited):
    """One has three quarters of what the fastest plan needs there, the other enough; either way round."""
    free = max(peaks(limited.free))
    for limits in ([2 * free, int(0.75 * free)], [int(0.75 * free), 2 * free]):
        fitted = training.piped(pipelined("auto", microbatches=8, memory_limit_bytes=limits))
        report = fitted.report
        assert all(peak * 9 / 8 <= limit for peak, limit in zip(peaks(fitted), limits, strict=True))
        assert (report.memory_limit_bytes, report.memory_limits_bytes) == (min(limits), tuple(limits))
        shown = ", ".join(map(bytes_text, limits))
        assert f"{shown}, as asked" in report.summary()
        assert_equal_bits(limited.free.weights, fitted.weights)


def test_limits_that_are_too_few(training):
    with pytest.raises(tf_ooo.OptionsError, match=r"1 limits are given for 2 devices; give one for each"):
        training.piped(pipelined("auto", memory_limit_bytes=[10_000]))


class AsOftenAsDataSay(keras.layers.Layer):
    """A loop of which nobody knows before it runs how often it does."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(7, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        times = 2 + tf.cast(x[0, 0] > 1e30, tf.int32)
        return tf.while_loop(lambda i, x: i < times, lambda i, x: (i + 1, self.dense(x)), (0, x))[1]


def test_lists_of_no_known_size():
    def make():
        inputs = keras.Input((7,))
        return keras.Model(inputs, keras.layers.Dense(3)(AsOftenAsDataSay()(inputs)))

    training = Training(make, adam, (X, Y), epochs=2)
    with pytest.raises(tf_ooo.MemoryLimitError, match=r"^memory_limit_bytes=10000: the sizes of "):
        training.fit(pipelined("1f1b", microbatches=8, memory_limit_bytes=10_000))


@needs_keras_3  # LSTM and GRU of Keras 2 hide their loops in functions
def test_loops_of_a_known_number_of_time_steps():
    def make():
        inputs = keras.Input((7, 1))
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.LSTM(5)(inputs)))

    training = Training(make, adam, (X[..., None], Y), epochs=3)
    with pytest.raises(tf_ooo.MemoryLimitError) as refused:
        training.fit(pipelined("gpipe", microbatches=8, memory_limit_bytes=1000))
    assert refused.value.smallest_bytes > 1000
    limited = training.piped(
        pipelined("gpipe", microbatches=8, memory_limit_bytes=refused.value.smallest_bytes)
    )
    assert max(peaks(limited)) * 9 / 8 <= refused.value.smallest_bytes + 1


def test_a_fit_that_ends_before_the_model_is_cut_says_so():
    training = Training(mlp, adam, EVEN, batch_size=24, epochs=1)
    callback = pipelined("auto", profile_steps=3)
    training.fit(callback)
    notes = [note for note in callback.report.notes if "before the model was cut" in note]
    assert len(notes) == 1
    assert notes[0].startswith("training ended after 2 steps, before the model was cut")
    assert callback.report.rewritten_graph is None


def large():
    """Kernels of 1.6 MB, and small ones between them."""
    inputs = keras.Input((7,))
    x = inputs
    for number in range(4):
        name = f"large_{number}" if number else "first"
        x = keras.layers.LayerNormalization()(x)
        x = keras.layers.Dense(640, activation="tanh", name=name)(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def clipped():
    """All updates wait for the norm of all gradients."""
    return keras.optimizers.Adam(0.01, global_clipnorm=1.0)


@pytest.mark.parametrize("optimizer", [adam, momentum, clipped])
def test_large_weights_are_updated_one_after_the_other(optimizer):
    """On each device; an optimizer makes several tensors of their size on its way."""
    training = Training(large, optimizer, EVEN, epochs=2)
    fits = fits_of(training, "gpipe", "zb_v")
    assert_same_bits(training, fits, far=None)
    for fitted in fits.values():
        index, writes = GraphIndex(fitted.report.rewritten_graph), defaultdict(list)
        for name, device in kernel_writes(fitted.report.rewritten_graph):
            writes[device].append(index.of(name))
        assert sum(map(len, writes.values())) == 3
        assert any(len(nodes) > 1 for nodes in writes.values())
        for nodes in writes.values():
            assert all(index.implied(*sorted(pair, key=index.position.__getitem__)) for pair in pairs(nodes))


def pairs(nodes):
    return itertools.combinations(nodes, 2)


def kernel_writes(graph):
    """The ops that write the large kernels, and their devices."""
    names = {
        node.name: json.loads(node.attr["_ooo_variable"].s)["name"]
        for node in graph.node
        if "_ooo_variable" in node.attr
    }
    for node in graph.node:
        variable = names.get(node.input[0], "") if node.input else ""
        if node.op.startswith("Assign") and re.fullmatch(r"large_\d/kernel", variable):
            yield node.name, node.device
