"""The first steps of a pipeline: which is profiled, which are only timed, and the costs that come of it."""

from __future__ import annotations

import numpy as np
import pytest

import tf_ooo
from tests.zoo import keras
from tf_ooo.costs.profile import usable_cores
from tf_ooo.costs.table import CostTable
from tf_ooo.fit import distributed

pytestmark = pytest.mark.devices(2)


@pytest.fixture
def measured(monkeypatch):
    """Note what costs are made from: profiled steps, and the seconds of those that were timed only."""
    seen, real = [], distributed.measured_costs

    def costs_of(step, profile, timed_s, **options):
        seen.append((profile.steps, list(timed_s)))
        return real(step, profile, timed_s, **options)

    monkeypatch.setattr(distributed, "measured_costs", costs_of)
    return seen


def fitted(rows=96, **options):
    keras.utils.set_random_seed(4)
    hidden = [keras.layers.Dense(width, "relu") for width in (40, 90, 20)]
    model = keras.Sequential([keras.Input((7,)), *hidden, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    random = np.random.default_rng(1)
    x, y = random.normal(size=(rows, 7)).astype("float32"), random.integers(0, 3, rows)
    callback = tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=2, microbatches=2, schedule="gpipe", **options))
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[callback])
    return callback.report


@pytest.mark.parametrize(("profile_steps", "timed"), [(3, 2), (2, 1), (1, 0)])
def test_the_last_of_the_measured_steps_is_profiled(measured, profile_steps, timed):
    fitted(profile_steps=profile_steps)
    ((profiled, timed_s),) = measured
    assert profiled == 1
    assert len(timed_s) == timed
    assert all(seconds > 0 for seconds in timed_s)


@pytest.mark.parametrize(
    ("profile_steps", "rows", "timed"),
    [
        (3, 56, 2),  # the fourth step is smaller: the fifth is profiled
        (3, 40, 1),  # the third is, which is no measure of the others
        (1, 24, 0),  # the second is
    ],
)
def test_smaller_batches_do_not_count(measured, profile_steps, rows, timed):
    report = fitted(rows, profile_steps=profile_steps)
    ((profiled, timed_s),) = measured
    assert (profiled, len(timed_s)) == (1, timed)
    assert report.costs.rows is None or report.costs.rows == 8


def test_the_costs_say_who_shares_cores_and_how_many_each_task_needs():
    costs = fitted(profile_steps=2).costs
    assert (costs.link.machines, costs.link.cores) == ((0, 0), usable_cores())
    shares = [share for layer in costs.layers for share in layer.occupancy]
    assert len(shares) == 3 * len(costs.layers)
    assert all(0 < share <= 1 for share in shares)
    assert CostTable.from_json(costs.to_json()) == costs


def test_with_costs_of_a_table_the_plan_is_as_it_was():
    """One that says nothing of cores is for devices that have their own."""
    layers = fitted(profile_steps=1).costs.layers
    costs = CostTable(layers, tf_ooo.Link(1e-5))
    assert not fitted(costs=costs).costs.link.machines


def test_too_few_layers_are_named_before_a_step_has_trained():
    model = keras.Sequential([keras.Input((9, 5)), keras.layers.LSTM(8)])  # a loop stays whole
    model.compile("adam", "mse", jit_compile=False)
    before = model.get_weights()
    callback = tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=2, microbatches=2))
    with pytest.raises(tf_ooo.OptionsError, match="2 stages are more than the 1 layers.*use fewer devices"):
        model.fit(np.ones((8, 9, 5)), np.ones((8, 8)), batch_size=4, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations) == 0
    assert all(map(np.array_equal, before, model.get_weights()))
