"""The demo's digits come with the package."""

from __future__ import annotations

import numpy as np

from tf_ooo.cli.digits import digits


def test_digits_are_images_from_zero_to_one_with_their_labels():
    images, labels = digits()
    assert images.shape == (1797, 8, 8)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0, 1)
    assert set(labels) == set(range(10))
