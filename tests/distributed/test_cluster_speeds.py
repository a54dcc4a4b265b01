"""Workers of unequal speed: measured, planned for, and seen in the report."""

from __future__ import annotations

import contextlib
import os

import keras
import numpy as np
import pytest

import tf_ooo
from benchmarks.machine import confine
from benchmarks.machine.confine import FREE
from tests.distributed.clusters import addresses, workers
from tests.same_bits import bits_of

_SHARE = 0.2  # of a core
WHY_NOT = confine.why_not(with_link=False)

pytestmark = [
    pytest.mark.alone,
    pytest.mark.takes(60),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-"),
]


@contextlib.contextmanager
def slowed(process):
    """The process gets a fifth of a core; this one what it wants, whatever else the machine does."""
    groups = confine.Shares(f"tf_ooo_speeds_{os.getpid()}")
    with groups.made(1, _SHARE):
        groups.put(0, process.pid)
        groups.put(FREE, os.getpid())
        try:
            yield
        finally:
            for process_id in (process.pid, os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    (groups.system.folder / "cgroup.procs").write_text(str(process_id))


def deep():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(160, "tanh") for _ in range(8)]
    model = keras.Sequential([keras.Input((160,)), *layers])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    return model


def fitted(cluster, **options):
    model, random = deep(), np.random.default_rng(1)
    x = random.normal(size=(384, 160)).astype("float32")
    callback = tf_ooo.OOOBackprop(mode="pipeline", devices=cluster, microbatches=4, **options)
    model.fit(x, x, batch_size=64, epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    return model, callback.report


@pytest.mark.parametrize("first_steps", ["auto", "cut"])
def test_a_slow_worker_gets_less(first_steps):
    """Also where costs are measured on the workers, each at its speed, and planned with again."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started, slowed(started[1]):
        model, report = fitted(cluster, profile_steps=1, first_steps=first_steps, schedule="1f1b")
        again, _ = fitted(cluster, costs=report.costs, schedule="1f1b")
    fast, slow = report.costs.link.speeds
    assert fast == 1.0
    assert slow < 0.7
    stages = report.pipeline["stages"]
    assert [stage["speed"] for stage in stages] == [fast, slow]
    assert len(stages[0]["layers"]) > len(stages[1]["layers"])
    assert f"{slow:.2g} times as fast" in report.summary()
    assert bits_of(model) == bits_of(again)
