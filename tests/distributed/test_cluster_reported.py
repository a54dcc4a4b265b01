"""Limits of memory that workers report: each in a control group of its own, as in a container."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest

import tf_ooo
from benchmarks.machine.groups import memory_group
from grappler_passes.compat import runtime
from tests import launches
from tests.distributed.clusters import addresses, wait_until_ready
from tests.memory_limited import needs_memory_groups
from tf_ooo.errors import MemoryLimitError
from tf_ooo.units import bytes_text

pytestmark = [
    pytest.mark.takes(90),
    needs_memory_groups,
]
# Each worker's group has so much; its process takes about 550 MB of it.
LIMITS = (1255 << 20, 955 << 20)
ROWS = 32


@pytest.fixture(scope="module")
def cluster():
    """Two workers in groups that may have less than the machine."""
    text = addresses(2)
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(memory_group(f"tf_ooo_test_{os.getpid()}_{task}", limit))
            for task, limit in enumerate(LIMITS)
        ]
        for task, group in enumerate(groups):
            start = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", text, "--task", str(task)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            environment = launches.script_environment()
            process = subprocess.Popen(group.command(start), env=environment, **pipes)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            wait_until_ready(process)
        yield types.SimpleNamespace(addresses=text, groups=groups)


def trained(callbacks, widths, epochs=2):
    """A model of Dense layers in the host's memory; and the losses of its epochs."""
    keras.utils.set_random_seed(1)
    with tf_ooo.host_memory():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                *(keras.layers.Dense(width, name=f"wide_{width}_{i}") for i, width in enumerate(widths)),
            ]
        )
    model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
    before = model.get_weights()
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 2 * ROWS, 8)).astype("float32")
    settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "epochs": epochs}
    try:
        history = model.fit(x, y, callbacks=callbacks, **settings).history["loss"]
    except MemoryLimitError:
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        raise
    return model, history


def pipeline(cluster, **options):
    return tf_ooo.OOOBackprop(
        tf_ooo.Pipeline(devices=cluster.addresses, microbatches=4, profile_steps=0, **options)
    )


# Weights, gradients and Adam's slots: 16 bytes a weight, so about 800 MB.
TOO_LARGE_FOR_ONE = [2048] * 13 + [8]


def test_a_model_that_no_worker_holds_is_planned_within_what_they_report(cluster):
    callback = pipeline(cluster)
    _, losses = trained([callback], TOO_LARGE_FOR_ONE)
    report = callback.report
    limits = report.memory_limits_bytes
    assert 0 < report.memory_limit_bytes == min(limits) < min(LIMITS)
    assert limits[0] - limits[1] > (LIMITS[0] - LIMITS[1]) / 2
    second = cluster.addresses.split(",")[1]
    assert report.memory_limit_from.startswith(
        f"worker {second} (task 1) has a control group of {LIMITS[1]} bytes of which "
    )
    assert f"{', '.join(map(bytes_text, limits))}, worker {second}" in report.summary()
    peaks = report.pipeline.predicted_peak_bytes
    assert all(peak * 9 / 8 <= limit < sum(peaks) for peak, limit in zip(peaks, limits, strict=True))
    assert peaks[0] > limits[1]  # which one limit for all would not have allowed
    assert "not compared: no device is to hold the whole model" in report.summary()
    assert all(group.most_bytes < limit for group, limit in zip(cluster.groups, LIMITS, strict=True))
    _, stock = trained([], TOO_LARGE_FOR_ONE)
    np.testing.assert_allclose(losses, stock, rtol=1e-4)


def test_one_layer_that_is_too_large_is_named_with_the_worker(cluster):
    with pytest.raises(MemoryLimitError) as refused:
        trained([pipeline(cluster)], [16, 4096, 12288, 8])
    said = str(refused.value)
    assert "; worker 127.0.0.1:" in said
    assert "memory_limit_bytes=0 plans without a limit" in said
    assert "wide_12288_2 alone takes " in said
    assert refused.value.smallest_bytes > 16 * 4096 * 12288


@pytest.mark.parametrize(("asked", "said"), [(0, ""), (2_000_000_000, "as asked")])
def test_a_limit_that_is_given_wins(cluster, asked, said):
    callback = pipeline(cluster, memory_limit_bytes=asked)
    trained([callback], [64, 64, 8], epochs=1)
    assert callback.report.memory_limit_bytes == (asked or None)
    assert callback.report.memory_limit_from == said
    # The devices of workers are among them, so that their GPUs are known.
    assert set(callback.report.pipeline.devices) <= set(runtime.device_memory_bytes())
