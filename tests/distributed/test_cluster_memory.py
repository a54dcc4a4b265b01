"""Checks that memory_limit_bytes holds, as the workers' allocators count it."""

from __future__ import annotations

import functools
import gc
import types

import keras
import numpy as np
import pytest

import tf_ooo
from tests import forked
from tests.distributed import telling_worker
from tests.distributed.clusters import addresses, running
from tests.distributed.telling_worker import file_of, now_bytes
from tf_ooo.errors import MemoryLimitError
from tf_ooo.hosts import cluster as workers

pytestmark = pytest.mark.takes(60)
# Micro-batches.  Plans leave a ninth of the limit free; rounding and work spaces of small models may pass it.
COUNT = 4


def deep(rows=768, width=192):
    """Activations are most of it."""
    return dense(rows, width, 8)


def wide(rows=96, width=1024):
    """Weights, their gradients and Adam's slots are."""
    return dense(rows, width, 8)


def recurrent(rows=512, steps=8, width=288):
    """Loops keep most of what is kept."""
    stacked = [keras.layers.LSTM(width, return_sequences=True), keras.layers.GRU(width)]
    inputs = keras.Input((steps, 24), batch_size=rows * COUNT)
    model = keras.Sequential([inputs, *stacked, keras.layers.Dense(4)])
    return model, *sequences(rows, steps)


def parted(rows=512, steps=16, width=288):
    """One loop, cut between its time steps."""
    inputs = keras.Input((steps, 24), batch_size=rows * COUNT)
    model = keras.Sequential([inputs, keras.layers.LSTM(width), keras.layers.Dense(4)])
    return model, *sequences(rows, steps)


def sequences(rows, steps):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows * COUNT, steps, 24)).astype("float32")
    return x, random.integers(0, 4, rows * COUNT)


def tied(rows=48, words=12, table=9000, width=192):
    """An embedding that is the output's kernel too: its gradient comes from both workers."""

    class Tied(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(table, width)
            self.middle = [keras.layers.Dense(width, activation="relu") for _ in range(4)]

        def call(self, ids):
            x = self.embedding(ids)
            for layer in self.middle:
                x = x + layer(x)
            return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))

    inputs = keras.Input((words,), batch_size=rows * COUNT, dtype="int32")
    random = np.random.default_rng(0)
    x, y = random.integers(0, table, (2, rows * COUNT, words))
    return keras.Model(inputs, Tied()(inputs)), x.astype("int32"), y


def smooth(rows=768, width=192):
    """The tensors between layers and activations are kept for the backward pass; they can be had again."""
    return dense(rows, width, 6, "gelu")


def dense(rows, width, depth, activation="relu"):
    inputs = keras.Input((24,), batch_size=rows * COUNT)
    x = inputs
    for _ in range(depth):
        x = keras.layers.Dense(width, activation=activation)(x)
    random = np.random.default_rng(0)
    x_rows = random.normal(size=(rows * COUNT, 24)).astype("float32")
    return keras.Model(inputs, keras.layers.Dense(7)(x)), x_rows, random.integers(0, 7, rows * COUNT)


@pytest.fixture(autouse=True)
def as_fast_as_each_other(monkeypatch):
    """They are.  On a busy machine one may be measured at a fiftieth, and gets next to nothing to do."""
    monkeypatch.setattr(workers, "relative_speeds", lambda devices, hosts, home: ())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two workers that tell their memory when they are asked, for all tests: a fit leaves nothing there."""
    folder, text = str(tmp_path_factory.mktemp("memory")), addresses(2)
    processes = [forked.start(telling_worker.serve, text, task, file_of(folder, task)) for task in range(2)]
    with running(processes):
        of_workers = [process.pid for process in processes]
        yield types.SimpleNamespace(addresses=text, ask=lambda: now_bytes(of_workers, folder))


class Peaks(keras.callbacks.Callback):
    """The most bytes that each worker has had in a step, of the last step."""

    def __init__(self, ask):
        super().__init__()
        self._ask = ask
        self.bytes = []

    def on_train_batch_begin(self, batch, logs=None):
        self._ask()

    def on_train_batch_end(self, batch, logs=None):
        self.bytes = [worker["peak"] for worker in self._ask()]


def measured_peaks(cluster, build, schedule, epochs, limit_bytes=None, microbatches=COUNT, **options):
    """Return the last step's bytes on each worker, and the report. The second step is the first there."""
    keras.utils.set_random_seed(3)
    model, x, y = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    ours = tf_ooo.OOOBackprop(
        mode="pipeline", devices=cluster.addresses, schedule=schedule, profile_steps=0,
        microbatches=microbatches, memory_limit_bytes=limit_bytes, loop_parts=4 if build is parted else 1,
        **options,
    )  # fmt: skip
    peaks = Peaks(cluster.ask)
    model.fit(x, y, batch_size=len(x), epochs=epochs, verbose=0, callbacks=[ours, peaks])
    return peaks.bytes, ours.report


def left_behind(cluster):
    """The bytes that fits have left on each worker."""
    keras.backend.clear_session()
    gc.collect()
    return [worker["current"] for worker in cluster.ask()]


@pytest.mark.parametrize("build", [deep, wide, tied])
def test_measured_peaks_stay_within_the_limit(build, cluster):
    free, report = measured_peaks(cluster, build, "gpipe", epochs=4 if build is deep else 1)
    largest = max(report.pipeline["predicted_peak_bytes"])
    with pytest.raises(MemoryLimitError) as refused:
        measured_peaks(cluster, build, "auto", 1, 1000)
    assert left_behind(cluster) == [0, 0]
    smallest = refused.value.smallest_bytes
    for limit in (smallest, (smallest + largest) // 2):
        peaks, _ = measured_peaks(cluster, build, "auto", 4, limit)
        assert left_behind(cluster) == [0, 0]
        assert 0 < max(peaks) <= limit
        assert min(peaks) > limit / 10, "both workers compute"
    if build is deep:
        assert max(free) > smallest


@pytest.mark.parametrize("build", [wide, tied])
def test_replicas_stay_within_the_limit_with_the_gradients_of_the_others(build, cluster):
    """Each worker runs the whole model, and holds half of it, or what one large layer leaves."""
    with pytest.raises(MemoryLimitError) as refused:
        measured_peaks(cluster, build, "auto", 1, 1000, replicas=2)
    limit = refused.value.smallest_bytes
    peaks, report = measured_peaks(cluster, build, "auto", 4, limit, replicas=2)
    assert report.pipeline.replicas == 2
    assert 0 < max(peaks) <= limit
    assert min(peaks) > limit / 10
    assert left_behind(cluster) == [0, 0]


def test_layers_that_run_again_need_less_as_the_allocators_count_it(cluster):
    """GPipe keeps all micro-batches: under a limit that it does not keep otherwise, as predicted."""
    peaks_of = functools.partial(measured_peaks, cluster, smooth, "gpipe", microbatches=8)
    free, without = peaks_of(epochs=4)
    least, again = peaks_of(epochs=4, recompute="all")
    assert not without.pipeline.recomputed
    assert again.planned.recompute
    predicted = [max(report.pipeline["predicted_peak_bytes"]) for report in (without, again)]
    saved = predicted[0] - predicted[1]
    assert saved > predicted[0] / 5
    assert max(free) - max(least) > 0.7 * saved
    limit = int(1.1 * 9 / 8 * predicted[1])
    assert max(least) < limit < max(free)
    with pytest.raises(MemoryLimitError):
        peaks_of(1, limit)
    peaks, report = peaks_of(4, limit, recompute="auto")
    assert 0 < max(peaks) <= limit
    assert 0 < len(report.planned.recompute) < len(report.layers)
    assert left_behind(cluster) == [0, 0]


class Predicting(keras.callbacks.Callback):
    """Predicts many rows at the end of a fit, and notes the most bytes of each worker then."""

    def __init__(self, ask, x):
        super().__init__()
        self._ask, self._x = ask, x

    def on_epoch_end(self, epoch, logs=None):
        self._ask()
        self.predicted = self.model.predict(self._x, batch_size=len(self._x), verbose=0)
        self.bytes = [worker["peak"] for worker in self._ask()]


def test_predictions_stay_within_the_limit(cluster):
    """Eight training batches are predicted at once; workers would need several times as much for them."""
    rows, peaks = 384 * COUNT, {}
    many = np.random.default_rng(1).normal(size=(8 * rows, 24)).astype("float32")
    for limit in (None, 6_000_000):
        keras.utils.set_random_seed(3)
        hidden = [keras.layers.Dense(192, activation="relu") for _ in range(8)]
        model = keras.Sequential([keras.Input((24,)), *hidden, keras.layers.Dense(7)])
        model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False)
        ours = tf_ooo.OOOBackprop(
            mode="pipeline", devices=cluster.addresses, schedule="1f1b", profile_steps=0,
            microbatches=COUNT, memory_limit_bytes=limit,
        )  # fmt: skip
        predicting = Predicting(cluster.ask, many)
        labels = np.zeros((2 * rows, 7), "float32")
        model.fit(many[: 2 * rows], labels, batch_size=rows, verbose=0, callbacks=[ours, predicting])
        peaks[limit] = predicting.bytes
        stock = model.predict(many, batch_size=len(many), verbose=0)
        np.testing.assert_allclose(predicting.predicted, stock, rtol=0, atol=1e-5)
        assert left_behind(cluster) == [0, 0]
    assert max(peaks[6_000_000]) <= 6_000_000 < max(peaks[None]) / 2, peaks


@pytest.mark.parametrize("build", [recurrent, parted])
def test_what_loops_keep_stays_within_the_limit(build, cluster):
    """An element for each time step, which the graph has no size of.

    The last test: TensorFlow keeps the zeros that gradients of loops begin with on workers.
    """
    with pytest.raises(MemoryLimitError) as refused:
        measured_peaks(cluster, build, "auto", 1, 1000)
    limit = refused.value.smallest_bytes
    before = left_behind(cluster)
    peaks, report = measured_peaks(cluster, build, "auto", 4, limit)
    taken = [peak - there for peak, there in zip(peaks, before, strict=True)]
    assert limit / 4 < max(taken) <= limit
    assert any("later in" in layer for stage in report.pipeline.stages for layer in stage.layers) == (
        build is parted
    )
