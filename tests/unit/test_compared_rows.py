"""Tests how far two micro-batches in one are from the mean of both, beside what rounding makes."""

from __future__ import annotations

import numpy as np

from tf_ooo.modes.pipeline.comparing import Compared


def compared(together, apart, grads_off, norms):
    return Compared(together, apart, np.array(grads_off), np.array(norms), 0.0, {})


def test_beside_their_own_size():
    pair = compared(2.0, 1.5, [0.5, 0.0, 1e-9], [10.0, 0.0, 1e-9])
    assert pair.loss_off(0.0) == 0.25
    # The last one is small beside the first: it counts as a thousandth of that.
    np.testing.assert_allclose(pair.gradients_off(0.0), [0.05, 0.0, 1e-7])


def test_beside_the_size_at_first_where_training_has_made_them_small():
    pair = compared(2e-9, 1e-9, [1e-6, 1e-6], [2e-6, 4.0])
    assert pair.loss_off(0.0) == 0.5
    assert pair.loss_off(1.0) == 1e-9
    np.testing.assert_allclose(pair.gradients_off(np.array([0.5, 0.5])), [2e-6, 2.5e-7])


def test_nothing_is_not_off():
    assert compared(0.0, 0.0, [], []).loss_off(0.0) == 0.0
    assert compared(0.0, 0.0, [], []).gradients_off(0.0).size == 0
