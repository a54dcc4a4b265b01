"""Fits whose steps are recorded, and what holds for what was measured in all modes."""

from __future__ import annotations

import keras
import numpy as np

import tf_ooo
from tests.same_bits import same, values_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16 * 40, 12, 12, 3)).astype("float32")
Y = RNG.integers(0, 3, 16 * 40)


def model_of(**options):
    """Layers of unequal costs."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.layers.Input((12, 12, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **{"jit_compile": False, **options})
    return model


def fit(model, *callbacks, batches=40, **options):
    model.fit(
        X[: 16 * batches], Y[: 16 * batches], batch_size=16, shuffle=False, verbose=0,
        callbacks=list(callbacks), **options,
    )  # fmt: skip
    return model


def assert_same_weights(ours, other):
    assert same(values_of(ours), values_of(other))


def recorded(folder, options, **compiled):
    """The report of a fit with these options; its bits are those without a timeline."""
    callback = tf_ooo.OOOBackprop(options(timeline=folder))
    ours = fit(model_of(**compiled), callback)
    assert_same_weights(ours, fit(model_of(**compiled), tf_ooo.OOOBackprop(options())))
    return callback.report


def assert_covers(report, without=frozenset()):
    """Every planned task was measured, on its device, within the step; but for those ``without`` ops."""
    measured, planned = report.measured_timeline, report.planned
    assert measured is not None, report.not_measured
    assert set(planned.tasks) - without <= set(measured.schedule.tasks)
    device_of = {task: device for (device, _), tasks in planned.lanes.items() for task in tasks}
    for event in measured.events:
        assert event.device == device_of.get(event.task, event.device)
        assert 0 <= event.start_s <= event.end_s <= measured.makespan_s
    assert all(0 < busy_s <= measured.makespan_s for busy_s in measured.busy_s)
